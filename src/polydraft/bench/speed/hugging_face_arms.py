"""Arms of Hugging Face's own loops on the same model objects: `generate`, with an assistant model, with prompt lookup.

What happens inside is seen by hooks on the models' forward passes: which tokens were scored, and how long it took.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from polydraft.bench.environment import now
from polydraft.bench.speed.arms import Arm, Generated, PromptBatch, generation_options
from polydraft.bench.speed.replay import Replay
from polydraft.engine import Statistics
from polydraft.machine_code import clock
from polydraft.models import cache_in
from polydraft.probs import Noise

LOOKUP_TOKENS = 10
"""Drafts per lookup; Hugging Face has no default, and its documentation and most users take ten."""


@dataclass
class Passes:
    """A model's forward passes during one generation.

    Args:
        before: per pass, the tokens in the cache when it began.
        scored: per pass, the tokens that it scored.
        seconds: per pass, how long it took.
    """

    before: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def hugging_face_arm(model: nn.Module, name: str = "hf") -> Arm:
    """Return Hugging Face's plain `generate`."""
    return _arm(name, model, {})


def lookup_arm(model: nn.Module, name: str = "hf-lookup", tokens: int = LOOKUP_TOKENS) -> Arm:
    """Return Hugging Face's prompt lookup of so many tokens, `prompt_lookup_num_tokens`, which takes one row."""
    return _arm(name, model, {"prompt_lookup_num_tokens": tokens})


def assisted_arm(model: nn.Module, draft: nn.Module, name: str = "hf-assisted", **settings: Any) -> Arm:
    """Return Hugging Face's assisted generation, which takes one row.

    transformers 5 reads an assistant's settings from the assistant's own `generation_config`, and writes the number of
    drafts back to it under its heuristic schedule. So the settings go into a copy, which stands there for one call:
    num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold.
    """
    return _arm(name, model, {"assistant_model": draft}, draft, settings)


def _arm(
    name: str,
    model: nn.Module,
    own: dict[str, Any],
    draft: nn.Module | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Arm:
    """Return an arm with options of its own, with which Hugging Face takes one row."""

    def run(batch: PromptBatch, temperature: float, max_new_tokens: int, seed: int) -> Generated:
        options = generation_options(model, batch, temperature, max_new_tokens) | own
        with nullcontext() if draft is None else _own_settings(draft, settings):
            return _generated(model, draft, options, seed, batch.replay)

    return Arm(name, run, most_rows=1 if own else None)


def _generated(
    model: Any, draft: nn.Module | None, options: dict[str, Any], seed: int, replay: Replay | None = None
) -> Generated:
    prompt = options["input_ids"]
    begin = clock()
    with _torch_seeded(seed, model.device), _without_warnings(), observed(model, replay) as target:
        if draft is None:
            drafted, sequences = Passes(), model.generate(**options)
        else:
            with observed(draft) as drafted:
                sequences = model.generate(**options)
    total = now(model.device) - begin
    ends = {*options["eos_token_id"]} if isinstance(options["eos_token_id"], list) else set[int]()
    new = [_until_end(row, ends) for row in sequences[:, prompt.shape[1] :].tolist()]
    statistics = statistics_of(target, drafted, prompt.shape[1], [len(row) for row in new], total)
    return Generated(tuple(map(tuple, new)), statistics)


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    """Return a row up to its first end; what comes behind is padding."""
    place = next((place for place, token in enumerate(row) if token in ends), len(row))
    return row[: place + 1]


@contextmanager
def observed(model: nn.Module, replay: Replay | None = None) -> Iterator[Passes]:
    """Note a model's forward passes, and let it write known texts if there is a replay."""
    passes, device = Passes(), next(model.parameters()).device
    begin = 0.0

    def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal begin
        cache = cache_in(named)
        passes.before.append(0 if cache is None else int(cache.get_seq_length()))
        passes.scored.append(named["input_ids"].shape[1])
        begin = now(device)

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        passes.seconds.append(now(device) - begin)
        if replay is not None:
            output.logits = replay.behind(output.logits, passes.before[-1] + passes.scored[-1])
        return output

    hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def statistics_of(target: Passes, draft: Passes, prompt: int, new: list[int], total: float) -> Statistics:
    """Read off a generation's passes what was drafted and accepted, and where the time went.

    A pass of the target scores committed tokens that are not in the cache yet, then a chain of drafts; how many of
    these were accepted shows in what the cache holds before the next pass. The first pass of each model is the
    prompt's and counts as "prefill", though the target's already yields tokens: it is a target call, but no step.
    """
    rows, longest = len(new), max(new)
    known = [prompt, *(before + 1 for before in target.before[1:]), prompt + longest]
    calls = len(target.scored) if rows == 1 else sum(new)  # rows take a pass for each token, and none when they ended
    result = Statistics(new_tokens=sum(new), steps=len(target.scored) - 1, target_calls=calls)
    for place, (before, scored) in enumerate(zip(target.before, target.scored, strict=True)):
        drafts, kept = before + scored - known[place], known[place + 1] - known[place] - 1
        result.drafted += rows * drafts
        result.accepted += rows * kept
        _count(result.offered_at, min(drafts, kept + 1), rows)
        _count(result.accepted_at, kept, rows)
    seconds = {
        "prefill": sum(target.seconds[:1]) + sum(draft.seconds[:1]),
        "draft": sum(draft.seconds[1:]),
        "target": sum(target.seconds[1:]),
        "verify": 0.0,
    }
    result.seconds = {**seconds, "total": total, "rest": max(0.0, total - sum(seconds.values()))}
    return result


def _count(totals: list[int], reached: int, rows: int) -> None:
    totals.extend([0] * (reached - len(totals)))
    for place in range(reached):
        totals[place] += rows


@contextmanager
def _own_settings(draft: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    kept = draft.generation_config
    draft.generation_config = copy.deepcopy(kept)
    for name, value in settings.items():
        setattr(draft.generation_config, name, value)
    try:
        yield
    finally:
        draft.generation_config = kept


@contextmanager
def _torch_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch's global generators, which Hugging Face samples from, start from the seed; restore them after."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.set_rng_state(Noise.from_seed(seed, 1).generators[0].get_state())
        for gpu in gpus:
            torch.cuda.set_rng_state(Noise.from_seed(seed, 1, gpu).generators[0].get_state(), gpu)
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep Hugging Face from advising itself: its assistant is called in a way that it calls deprecated."""
    logger = logging.getLogger("transformers")
    kept = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(kept)
