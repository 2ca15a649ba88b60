"""What became of a request so far: text, log-probabilities, counts of drafts, and usage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.options.commands.serve_options import DETAILED, NONE, SUMMARY
from polydraft.server.wire.answer_types import AllDraftCounts, DraftCounts, Finish, Measures, Rule, StepCounts, Usage
from polydraft.server.worker import by_depth

FINISHES: Mapping[str, Finish] = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


@dataclass
class Counts:
    """How drafts fared: vLLM's numbers, and those that trees have beside."""

    calls: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    deepest: int = 0
    histogram: list[int] = field(default_factory=list[int])
    offered_at: list[int] = field(default_factory=list[int])
    kept_at: list[int] = field(default_factory=list[int])
    sources: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    steps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(self, said: Mapping[str, Any]) -> None:
        """Count a step."""
        drafted, accepted = int(said["drafted"]), int(said["accepted"])
        self.calls, self.tokens = self.calls + bool(said["tokens"]), self.tokens + len(said["tokens"])
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        if drafted:
            self.drafts, self.deepest = self.drafts + 1, max(self.deepest, int(said["depth"]))
            _add(self.histogram, [0] * accepted + [1])
            self.steps.append((drafted, accepted))
        _add(self.offered_at, [1] * int(said["offered"]))
        _add(self.kept_at, [1] * int(said["kept"]))
        if said["source"]:
            _add(self.sources.setdefault(said["source"], [0, 0]), [drafted, accepted])

    def join(self, other: "Counts") -> None:
        """Count what another choice counted."""
        for name in ("calls", "tokens", "drafts", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.deepest = max(self.deepest, other.deepest)
        for name in ("histogram", "offered_at", "kept_at"):
            _add(getattr(self, name), getattr(other, name))
        self.steps += other.steps
        for source, counts in other.sources.items():
            _add(self.sources.setdefault(source, [0, 0]), counts)

    def told(self, level: str) -> DraftCounts:
        """Return the numbers in vLLM's shape, with ours behind them.

        `num_spec_tokens` is the most drafts that a path of a tree had, and the histogram has a place for every number
        up to it. In detail there is an entry for each step with drafts, in order, those of one choice behind another's.
        """
        steps = self.drafts
        detail = StepCounts(
            per_step_accepted=[accepted for _, accepted in self.steps],
            per_step_drafted=[drafted for drafted, _ in self.steps],
        )
        return {
            **(detail if level == DETAILED else StepCounts()),
            "mean_acceptance_length": round(1 + self.accepted / max(1, steps), 4),
            "draft_acceptance_rate": round(self.accepted / max(1, self.drafted), 4),
            "acceptance_histogram": self.histogram + [0] * (self.deepest + 1 - len(self.histogram)),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self.deepest,
            "target_calls": self.calls,
            "tokens_per_call": round(self.tokens / self.calls, 4) if self.calls else None,
            "acceptance_by_depth": by_depth(self.offered_at, self.kept_at),
            "sources": {name: {"drafted": one, "accepted": kept} for name, (one, kept) in self.sources.items()},
        }


@dataclass
class Choice:
    """A text in progress; `predicted` are the tokens of the prediction that it has."""

    number: int
    text: str = ""
    tokens: int = 0
    predicted: int = 0
    finish: str = ""
    stopped_by: Any = None
    cached: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    counts: Counts = field(default_factory=Counts)

    def add(self, said: Mapping[str, Any]) -> None:
        """Take what a step brought."""
        self.text += said["text"]
        self.tokens += len(said["tokens"])
        self.predicted = said["predicted"]
        self.finish, self.stopped_by = said["finish"], said["stopped_by"]
        self.logprobs += said.get("logprobs", ())
        self.counts.add(said)

    @property
    def reason(self) -> Finish | None:
        """Why it ended, as OpenAI says it; None if it has not."""
        return FINISHES.get(self.finish)


@dataclass
class OpenRequest:
    """A request in progress.

    Args:
        begun: what the worker said when it took the request.
        n: choices of each prompt.
        choices: the texts.
        level: how much is told of drafts.
    """

    begun: Mapping[str, Any]
    n: int
    choices: list[Choice]
    level: str = SUMMARY

    @classmethod
    def of(cls, begun: Mapping[str, Any], n: int, level: str) -> "OpenRequest":
        """Return the tally of a request that was taken."""
        return cls(begun, n, [Choice(number) for number in range(len(begun["seeds"]))], level)

    def add(self, kind: str, said: Mapping[str, Any]) -> Choice:
        """Take an event; return the choice that it is about."""
        choice = self.choices[said["number"]]
        if kind == "joined":
            choice.cached = said["cached"]
        else:
            choice.add(said)
        return choice

    @property
    def over(self) -> bool:
        """Whether all texts have ended."""
        return all(choice.finish for choice in self.choices)

    @property
    def size(self) -> int:
        """About how many values an answer tells: tokens, and log-probabilities of theirs and of prompts'."""
        echoes = [len(one["tokens"]) + _values(one.get("logprobs", ())) for one in self.begun.get("echo", ())]
        own = sum(choice.tokens + _values(choice.logprobs) for choice in self.choices)
        return own + self.n * sum(echoes)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.begun["prompt_tokens"])

    @property
    def completion_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def rule(self) -> Rule:
        """The rule that verifies drafts, None where nothing is written, and whether the text's law is the target's."""
        return {"verifier": self.begun["verifier"], "lossless": self.begun["lossless"]}

    def counts(self) -> Counts:
        """Return the counts of all choices together."""
        total = Counts()
        for choice in self.choices:
            total.join(choice.counts)
        return total

    def usage(self) -> Usage:
        """Return the usage in OpenAI's shape.

        Tokens of a prediction are accepted if the text has them, whoever brought them, and rejected otherwise; with
        several texts each has the whole prediction. `Counts.sources` counts drafts, which the target's own tokens are
        not.
        """
        accepted = sum(choice.predicted for choice in self.choices)
        rejected = int(self.begun["prediction_tokens"]) * len(self.choices) - accepted
        cached = sum(self.choices[first].cached for first in range(0, len(self.choices), self.n))
        new = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def metrics(self) -> Measures | None:
        """Return how drafts fared: all together, and each choice if there are several; None if that is not told."""
        if self.level == NONE:
            return None
        told: AllDraftCounts = {**self.rule, **self.counts().told(self.level)}
        if len(self.choices) > 1:
            told["choices"] = [choice.counts.told(self.level) for choice in self.choices]
        return {"speculative_decoding": told}


def _add(totals: list[int], more: Sequence[int]) -> None:
    totals.extend([0] * (len(more) - len(totals)))
    for place, value in enumerate(more):
        totals[place] += value


def _values(own: Sequence[Mapping[str, Any]]) -> int:
    """Return how many log-probabilities tokens have, with those of the likeliest; a prompt's first has none."""
    return len(own) * (1 + len(own[-1]["top"])) if own else 0
