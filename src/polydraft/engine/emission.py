"""What one step of the decode loop yields, the statistics of many, and the clock that a step is given."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.machine_code import clock
from polydraft.trees import TokenTree, Verdict


@dataclass(frozen=True)
class Emission:
    """What one row gained in one step.

    Args:
        tokens: the new tokens, accepted drafts first; shorter than the verdict where the text ended.
        accepted: how many of `tokens` were drafted.
        drafted: drafts in the row's tree.
        offered: how many depths had a draft to accept: the accepted ones, and one more if the path did not end at a
            leaf.
        kept: drafts that the verifier accepted, also those after the end of the text.
        finish: why the row ended with this step: "eos", "stop", "length" or "context"; empty if it goes on.
        logprobs: with output_logprobs, a `Logprob` for each token; else none.
        source: who drafted; empty where nobody did.
        verifier: the name of the rule that verified.
        lossless: whether that rule keeps the target's law.
        forced: how many of `tokens`, behind the accepted ones, a grammar forced: no pass was taken for each.
    """

    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    offered: int
    kept: int
    finish: str = ""
    logprobs: tuple[Any, ...] = ()
    source: str = ""
    verifier: str = ""
    lossless: bool = True
    forced: int = 0

    def first(self, count: int) -> "Emission":
        """Return what the row gained if only so many of its tokens came, so that it goes on if there were more."""
        if count >= len(self.tokens):
            return self
        accepted, offered, kept = (min(one, count) for one in (self.accepted, self.offered, self.kept))
        tokens, forced = self.tokens[:count], min(self.forced, count - accepted)
        return replace(self, tokens=tokens, accepted=accepted, offered=offered, kept=kept, finish="", forced=forced)


@dataclass(frozen=True, eq=False)
class Block:
    """One step of a batch: what every unfinished row gained, and the tree it came from.

    Args:
        rows: row number -> what it gained; finished rows are absent.
        tree: the scored token tree.
        verdict: what was kept of it.
        logits: the target's at every node; None unless they are to be kept.
        scores: the same after the logits processors, before temperature and filters; None likewise.
        lessons: for each policy that learns from steps, a `Lesson` for each text whose trees it chooses.
        faults: what failed in drafters in this step, or as its texts began.
    """

    rows: dict[int, Emission]
    tree: TokenTree
    verdict: Verdict
    logits: Float[Tensor, "b n V"] | None = None
    scores: Float[Tensor, "b n V"] | None = None
    lessons: tuple[tuple[Any, ...], ...] = ()
    faults: tuple[Any, ...] = ()


@dataclass
class Statistics:
    """Totals over the blocks of a generation. Block efficiency counts the next token; 1.0 is plain decoding.

    Args:
        new_tokens: tokens emitted, over all rows.
        target_calls: rows scored by the target after the prompt: steps times unfinished rows.
        steps: target forward passes after the prompt.
        drafted: drafts proposed.
        accepted: drafts accepted and emitted.
        offered_at: at depth i, how often a draft was there to accept with all before it accepted.
        accepted_at: at depth i, how often it was accepted.
        seconds: time in "prefill", "draft", "target", "verify" and "total"; "rest" is what remains. On a GPU the parts
            are timed if that was asked for.
        fallback: why the drafter was dropped for plain decoding; empty if it was not.
        idle: why a planner does not ask the drafter at the end, though it was to draft; empty where it does.
        in_force: the logits processors, temperature and filters of the target's law, in the order in which they are
            applied; those of the first row or text.
        prompt_read: tokens of the prompts that the target read.
        prompt_known: tokens of the prompts that it knew from a past.
        sources: by who drafted, the drafts proposed, and those accepted and emitted. The target's own token behind
            them is no draft, also where it is as predicted: `polydraft.drafters.Followed` counts a prediction's tokens.
        verifier: the name of the rule that keeps drafts; of several rules all names, with semicolons.
        lossless: whether it keeps the target's law, and so do all others; False for a lossy rule.
        forced: tokens that a grammar forced, and that took no pass each; they are no drafts.
    """

    new_tokens: int = 0
    target_calls: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    fallback: str = ""
    idle: str = ""
    in_force: tuple[str, ...] = ()
    prompt_read: int = 0
    prompt_known: int = 0
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    verifier: str = ""
    lossless: bool = True
    forced: int = 0

    def add(self, block: Block, prompt_read: int = 0, prompt_known: int = 0) -> None:
        """Count one block, all of it at once: whoever is interrupted has counted it or not.

        Args:
            block: the block.
            prompt_read: tokens of prompts that were read before it.
            prompt_known: tokens of prompts that were known before it.
        """
        new_tokens, drafted, accepted = self.new_tokens, self.drafted, self.accepted
        offered_at, accepted_at, sources = [*self.offered_at], [*self.accepted_at], {**self.sources}
        forced, lossless = self.forced, self.lossless
        for row in block.rows.values():
            new_tokens, drafted, accepted = new_tokens + len(row.tokens), drafted + row.drafted, accepted + row.accepted
            forced, lossless = forced + row.forced, lossless and row.lossless
            _add_lists(offered_at, [1] * row.offered)
            _add_lists(accepted_at, [1] * row.kept)
            if row.source:
                _add_source(sources, row.source, (row.drafted, row.accepted))
        vars(self).update(
            steps=self.steps + 1,
            target_calls=self.target_calls + len(block.rows),
            new_tokens=new_tokens,
            drafted=drafted,
            accepted=accepted,
            forced=forced,
            offered_at=offered_at,
            accepted_at=accepted_at,
            sources=sources,
            prompt_read=self.prompt_read + prompt_read,
            prompt_known=self.prompt_known + prompt_known,
            verifier=names_of([self.verifier, *(row.verifier for row in block.rows.values())]),
            lossless=lossless,
        )

    def note(self, seconds: Mapping[str, float], fallback: str, idle: str = "") -> None:
        """Take over the stopwatch's times, and what became of the drafter."""
        parts = sum(value for name, value in seconds.items() if name != "total")
        self.seconds = {**seconds, "rest": max(0.0, seconds.get("total", 0.0) - parts)}
        self.fallback, self.idle = fallback, idle

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call, the next token included; NaN before the first call."""
        return self.new_tokens / self.target_calls if self.target_calls else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """The share of depths with a draft to accept at which one was accepted; NaN without drafts."""
        offered = sum(self.offered_at)
        return sum(self.accepted_at) / offered if offered else float("nan")

    @property
    def acceptance_by_depth(self) -> list[float]:
        """The acceptance rate at depth 1, 2, ..., each given that all depths before were accepted."""
        padded = self.accepted_at + [0] * (len(self.offered_at) - len(self.accepted_at))
        return [kept / offered for kept, offered in zip(padded, self.offered_at, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall-clock time, the prompt's pass included; NaN if nothing was timed."""
        total = self.seconds.get("total", 0.0)
        return self.new_tokens / total if total else float("nan")

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON; undefined ratios are None."""
        ratios = {
            "block_efficiency": self.block_efficiency,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
        }
        return {
            "new_tokens": self.new_tokens,
            "prompt_read": self.prompt_read,
            "prompt_known": self.prompt_known,
            "target_calls": self.target_calls,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "forced": self.forced,
            **{name: None if value != value else round(value, 4) for name, value in ratios.items()},
            "acceptance_by_depth": [round(rate, 4) for rate in self.acceptance_by_depth],
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "fallback": self.fallback,
            "idle": self.idle,
            "verifier": self.verifier,
            "lossless": self.lossless,
            "in_force": list(self.in_force),
            "sources": {
                name: {"drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in self.sources.items()
            },
        }


def summed(parts: Sequence[Statistics]) -> Statistics:
    """Add up the statistics of several generations."""
    total = Statistics()
    for part in parts:
        total.new_tokens += part.new_tokens
        total.prompt_read += part.prompt_read
        total.prompt_known += part.prompt_known
        total.target_calls += part.target_calls
        total.steps += part.steps
        total.drafted += part.drafted
        total.accepted += part.accepted
        total.forced += part.forced
        total.fallback = total.fallback or part.fallback
        total.idle = part.idle or total.idle
        total.in_force = total.in_force or part.in_force
        total.lossless &= part.lossless
        _add_lists(total.offered_at, part.offered_at)
        _add_lists(total.accepted_at, part.accepted_at)
        for name, counts in part.sources.items():
            _add_source(total.sources, name, counts)
        for name, value in part.seconds.items():
            total.seconds[name] = total.seconds.get(name, 0.0) + value
    total.verifier = names_of([part.verifier for part in parts])
    return total


def names_of(rules: Sequence[str]) -> str:
    """Return the names of rules, each once, in the order in which they come first."""
    return "; ".join(dict.fromkeys(name for one in rules if one for name in one.split("; ")))


def _add_source(sources: dict[str, tuple[int, int]], name: str, more: tuple[int, int]) -> None:
    drafted, accepted = sources.get(name, (0, 0))
    sources[name] = (drafted + more[0], accepted + more[1])


def _add_lists(totals: list[int], more: list[int]) -> None:
    totals.extend([0] * (len(more) - len(totals)))
    for place, value in enumerate(more):
        totals[place] += value


class Clock(Protocol):
    """What the parts of a step are charged to."""

    def charge(self, name: str, whose: object = None) -> AbstractContextManager[None]:
        """Charge the time spent inside to "prefill", "draft", "target", "verify" or "total", and to somebody."""
        ...


class Untimed:
    """No clock."""

    def charge(self, name: str, whose: object = None) -> AbstractContextManager[None]:
        """Charge nothing."""
        return nullcontext()


UNTIMED = Untimed()


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
        self._own: dict[int, float] = {}
        self._before: dict[str, float] = {}
        self._on_gpu, self.timed = device.type == "cuda", timed
        self._marks: list[tuple[str, object, Any, Any]] = []

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds so far."""
        marks, self._marks = self._marks, []
        for name, whose, begin, end in marks:
            end.synchronize()
            self._add(name, whose, begin.elapsed_time(end) / 1000)
        return self._clock

    @contextmanager
    def charge(self, name: str, whose: object = None) -> Iterator[None]:
        """Charge the time spent inside to `name`, and to somebody (`own`)."""
        if self._on_gpu and name != "total":
            with self._marked(name, whose) if self.timed else nullcontext():
                yield
            return
        begin = clock()
        try:
            yield
        finally:
            self._add(name, whose, clock() - begin)

    @contextmanager
    def _marked(self, name: str, whose: object) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._marks.append((name, whose, begin, end))

    def _add(self, name: str, whose: object, seconds: float) -> None:
        self._clock[name] = self._clock.get(name, 0.0) + seconds
        if whose is not None:
            self._own[id(whose)] = self._own.get(id(whose), 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap for drafts, the target's passes, and in total but for prompts."""
        seconds = self.seconds
        now = {name: seconds.get(name, 0.0) for name in ("draft", "target", "total")}
        now["total"] -= seconds.get("prefill", 0.0)
        took = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        self._own = {}
        return took

    def forget(self, whose: object) -> None:
        """Drop what was charged to somebody who is gone."""
        self._own.pop(id(whose), None)

    def own(self, whose: object) -> float:
        """Return the seconds since the last lap that were charged to somebody."""
        _ = self.seconds  # which reads the marks
        return self._own.get(id(whose), 0.0)
