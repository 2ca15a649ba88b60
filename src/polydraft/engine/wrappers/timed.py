"""Stopwatches around models, drafters and verifiers, so that the algorithms themselves know nothing of time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polydraft.drafters import Drafter, Session, Text, resumed
from polydraft.models import Cache, Forward, LanguageModel
from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.trees import Draft, TreePolicy, Verdict
from polydraft.verifiers import TreeVerifier


class Stopwatch:
    """Seconds by name. On a GPU the device is waited for, so that time is charged to what took it."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.waits = device.type == "cuda"
        self._before = 0.0

    @contextmanager
    def charge(self, name: str) -> Iterator[None]:
        """Charge the time spent inside to `name`."""
        begin = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - begin

    def lap(self) -> float:
        """Return the total since the last lap, without the time for prompts."""
        now = self.seconds.get("total", 0.0) - self.seconds.get("prefill", 0.0)
        took, self._before = now - self._before, now
        return took

    def _now(self) -> float:
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()


class TimedModel:
    """A language model whose forward passes are charged to "prefill" (the first) and "target" (all others)."""

    def __init__(self, model: LanguageModel, watch: Stopwatch) -> None:
        self.model = model
        self.watch = watch
        self.vocab_size = model.vocab_size
        self.context = model.context
        self.device = model.device

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Return the model's own cache."""
        return self.model.new_cache(batch, capacity)

    def forward(self, *inputs: Any, logits_to_keep: int = 0, **options: Any) -> Forward:
        """Run the model's forward pass against the clock."""
        with self.watch.charge("prefill" if logits_to_keep else "target"):
            return self.model.forward(*inputs, logits_to_keep=logits_to_keep, **options)


class TimedDrafter:
    """A drafter whose work is charged to "draft", its reading of the prompt to "prefill"."""

    def __init__(self, drafter: Drafter, watch: Stopwatch) -> None:
        self.drafter = drafter
        self.watch = watch
        self.name = drafter.name
        self.reads_hidden = drafter.reads_hidden

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.drafter.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        """Start against the clock."""
        with self.watch.charge("prefill"):
            return self.drafter.start(text, session)

    def resume(self, state: Any, before: Text, text: Text, known: int, session: Session) -> Any:
        """Resume against the clock."""
        with self.watch.charge("prefill"):
            return resumed(self.drafter, state, before, text, known, session)

    def draft(self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise) -> Draft:
        """Draft against the clock."""
        with self.watch.charge("draft"):
            return self.drafter.draft(state, text, scheme, policy, noise)

    def commit(self, state: Any, text: Text, verdict: Verdict) -> Any:
        """Commit against the clock."""
        with self.watch.charge("draft"):
            return self.drafter.commit(state, text, verdict)

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Join against the clock."""
        with self.watch.charge("prefill"):
            return self.drafter.join(state, row, other)


class TimedVerifier:
    """A verifier whose work is charged to "verify"."""

    def __init__(self, verifier: TreeVerifier, watch: Stopwatch) -> None:
        self.verifier = verifier
        self.watch = watch
        self.scheme = verifier.scheme
        self.name = verifier.name
        self.lossless = verifier.lossless

    def verify(self, draft: Draft, target_probs: torch.Tensor, noise: Noise) -> Verdict:
        """Verify against the clock."""
        with self.watch.charge("verify"):
            return self.verifier.verify(draft, target_probs, noise)
