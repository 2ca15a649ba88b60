"""Stopwatches around models, drafters and verifiers, so that the algorithms themselves know nothing of time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, Session, is_sound
from polydraft.machine_code import clock
from polydraft.models import Cache, Forward, LanguageModel, can_branch, does_encode, does_remember, module_of
from polydraft.probs import Noise
from polydraft.reading import Features, Reader, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Pieces, TreePolicy, Verdict
from polydraft.verifiers import TreeVerifier, traits


class Stopwatch:
    """Seconds by name, by the clock; on a GPU the total alone, and of the rest what events on the device say.

    The clock stands still while machine code is made.

    Events are marks in the stream of work: to record one waits for nothing. Their times are read when somebody asks for
    `seconds`, who then waits for the last.

    Args:
        device: where the work is done.
        timed: whether events are recorded on a GPU.
    """

    def __init__(self, device: torch.device, *, timed: bool = True) -> None:
        self._clock: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._on_gpu, self._timed = device.type == "cuda", timed
        self._marks: list[tuple[str, Any, Any]] = []

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds so far."""
        marks, self._marks = self._marks, []
        for name, begin, end in marks:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        return self._clock

    @contextmanager
    def charge(self, name: str) -> Iterator[None]:
        """Charge the time spent inside to `name`."""
        if self._on_gpu and name != "total":
            with self._marked(name) if self._timed else nullcontext():
                yield
            return
        begin = clock()
        try:
            yield
        finally:
            self._add(name, clock() - begin)

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._marks.append((name, begin, end))

    def _add(self, name: str, seconds: float) -> None:
        self._clock[name] = self._clock.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap for drafts, the target's passes, and in total but for prompts."""
        seconds = self.seconds
        now = {name: seconds.get(name, 0.0) for name in ("draft", "target", "total")}
        now["total"] -= seconds.get("prefill", 0.0)
        took = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        return took


class TimedModel:
    """A language model whose forward passes are charged to "prefill" (the first) and "target" (all others)."""

    def __init__(self, model: LanguageModel, watch: Stopwatch) -> None:
        self.model, self.module = model, module_of(model)
        self.watch = watch
        self.vocab_size = model.vocab_size
        self.context = model.context
        self.device = model.device
        self.layers, self.width = getattr(model, "layers", None), getattr(model, "width", None)
        self.crowded = getattr(model, "crowded", None)
        self.branches, self.remembers, self.encodes = can_branch(model), does_remember(model), does_encode(model)

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> Cache:
        """Return the model's own cache."""
        return self.model.new_cache(batch, capacity, *(() if sources is None else (sources,)))

    def forward(self, *inputs: Any, logits_to_keep: int = 0, **options: Any) -> Forward:
        """Run the model's forward pass against the clock."""
        with self.watch.charge("prefill" if logits_to_keep else "target"):
            return self.model.forward(*inputs, logits_to_keep=logits_to_keep, **options)

    def embedded(self, tokens: Int[Tensor, "b n"], table: Float[Tensor, "e d"] | None = None) -> Float[Tensor, "b n d"]:
        """Return the model's own embeddings."""
        return self.model.embedded(tokens, table)

    def unembedded(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n V"]:
        """Return the logits of the model's own head."""
        return self.model.unembedded(states)

    def output_rows(self, tokens: Int[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Return rows of the model's own head."""
        return self.model.output_rows(tokens)

    def first_layers(self, count: int) -> LanguageModel:
        """Return the model of the first layers, which drafts, and whose time is the drafter's."""
        return self.model.first_layers(count)

    def last_layers(self, count: int) -> LanguageModel:
        """Return the model of the last layers, against the clock."""
        return TimedModel(self.model.last_layers(count), self.watch)


class TimedDrafter(Drafter):
    """A drafter whose work is charged to "draft", its reading of the prompt to "prefill"."""

    def __init__(self, drafter: Drafter, watch: Stopwatch) -> None:
        self.drafter = drafter
        self.watch = watch
        self.name, self.reads = drafter.name, drafter.reads
        self.riders, self.shares = drafter.riders, drafter.shares

    @property
    def own_name(self) -> str:
        """The drafter's."""
        return self.drafter.own_name

    @property
    def sound(self) -> bool:
        """Pass the question on."""
        return is_sound(self.drafter)

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.drafter.check(scheme)

    def models(self) -> tuple[LanguageModel, ...] | None:
        """Return the drafter's."""
        return self.drafter.models()

    def outside(self, row: int) -> bytes:
        """Pass the question on, against the clock."""
        with self.watch.charge("prefill"):
            return self.drafter.outside(row)

    def start(self, text: Text, session: Session) -> Any:
        """Start against the clock."""
        with self.watch.charge("prefill"):
            return self.drafter.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        """Read against the clock."""
        with self.watch.charge("prefill"):
            return self.drafter.read(state, text, features)

    def over(self, state: Any, target: Reader) -> Any:
        """Pass it on."""
        return self.drafter.over(state, target)

    def draft(
        self, state: Any, text: Text, scheme: Scheme, policy: TreePolicy, noise: Noise
    ) -> tuple[Draft | Pieces, Any]:
        """Draft against the clock."""
        with self.watch.charge("draft"):
            return self.drafter.draft(state, text, scheme, policy, noise)

    def commit(self, state: Any, step: Step) -> Any:
        """Commit against the clock."""
        with self.watch.charge("draft"):
            return self.drafter.commit(state, step)

    def join(self, state: Any, row: int, other: Any) -> Any:
        """Join against the clock."""
        with self.watch.charge("prefill"):
            return self.drafter.join(state, row, other)

    def rewind(self, state: Any, row: int, length: int) -> Any:
        """Pass it on."""
        return self.drafter.rewind(state, row, length)

    def leave(self, state: Any, row: int) -> Any:
        """Pass it on."""
        return self.drafter.leave(state, row)

    def finish(self, state: Any, text: Text, row: int) -> Any:
        """Finish against the clock."""
        with self.watch.charge("draft"):
            return self.drafter.finish(state, text, row)

    def of_row(self, state: Any, row: int) -> Any:
        """Pass it on."""
        return self.drafter.of_row(state, row)

    def ended(self, state: Any) -> bool:
        """Pass the question on."""
        return self.drafter.ended(state)

    def continues(self, state: Any) -> bool:
        """Pass the question on."""
        return self.drafter.continues(state)

    def untaught(self, state: Any) -> Any:
        """Pass the question on."""
        return self.drafter.untaught(state)


class TimedVerifier:
    """A verifier whose work is charged to "verify"."""

    def __init__(self, verifier: TreeVerifier, watch: Stopwatch) -> None:
        self.verifier = verifier
        self.watch = watch
        self.scheme = verifier.scheme
        self.name = verifier.name
        self.lossless = verifier.lossless
        self.best_alone = traits(verifier).best_alone

    def verify(self, draft: Draft, target_probs: torch.Tensor, noise: Noise) -> Verdict:
        """Verify against the clock."""
        with self.watch.charge("verify"):
            return self.verifier.verify(draft, target_probs, noise)
