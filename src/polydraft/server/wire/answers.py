"""What became of a request so far, and the answers in OpenAI's shapes, whole and in chunks."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from polydraft.models import AnswerEvent
from polydraft.options.commands.serve_options import DETAILED, NONE
from polydraft.server.wire.answer_parts import delta_of, message_of
from polydraft.server.wire.answer_types import (
    AllDraftCounts,
    AnswerEnding,
    ChatChoice,
    ChatCompletionChunk,
    ChatHead,
    ChatLogprobs,
    ChatPiece,
    ChatPrompt,
    CompletionChunk,
    Delta,
    DraftCounts,
    Finish,
    Measures,
    PromptScore,
    Resumed,
    Rule,
    Seeds,
    TextChoice,
    TextHead,
    TextLogprobs,
    Top,
    Trace,
    Usage,
)

FINISHES: Mapping[str, Finish] = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
AnyChunk = CompletionChunk | ChatCompletionChunk


GAINED = ("drafted", "accepted", "offered", "kept", "depth", "source")
"""What is noted of a step beside its number of tokens."""


class StepGain(NamedTuple):
    """What a step brought a text, in numbers: `offered` and `kept` are depths, `depth` is that of the whole tree."""

    tokens: int
    drafted: int
    accepted: int
    offered: int
    kept: int
    depth: int
    source: str


def draft_counts(gains: Sequence[StepGain], level: str) -> DraftCounts:
    """Return how drafts fared, in vLLM's shape with our numbers behind.

    `num_spec_tokens` is the most drafts that a path of a tree had, and the histogram has a place for every number up to
    it. In detail there is an entry for each step with drafts, in order, those of one choice behind another's.
    """
    steps = [one for one in gains if one.drafted]
    drafted, accepted = sum(one.drafted for one in steps), sum(one.accepted for one in steps)
    deepest, histogram = max((one.depth for one in steps), default=0), Counter(one.accepted for one in steps)
    by_depth = zip_longest(_reached(one.kept for one in gains), _reached(one.offered for one in gains), fillvalue=0)
    by_source = dict[str, list[StepGain]]()
    for one in gains:
        by_source.setdefault(one.source, []).append(one)
    counts: DraftCounts = {
        "mean_acceptance_length": round(1 + accepted / max(1, len(steps)), 4),
        "draft_acceptance_rate": round(accepted / max(1, drafted), 4),
        "acceptance_histogram": [histogram[count] for count in range(deepest + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": deepest,
        "target_calls": len(gains),
        "tokens_per_call": round(sum(one.tokens for one in gains) / len(gains), 4) if gains else None,
        "acceptance_by_depth": [round(kept / offered, 4) for kept, offered in by_depth],
        "sources": {
            name: {"drafted": sum(one.drafted for one in own), "accepted": sum(one.accepted for one in own)}
            for name, own in by_source.items()
            if name
        },
    }
    if level == DETAILED:
        counts["per_step_accepted"] = [one.accepted for one in steps]
        counts["per_step_drafted"] = [one.drafted for one in steps]
    return counts


def _reached(depths: Iterable[int]) -> list[int]:
    """Return how many of these depths are at least 1, 2, ..., up to the deepest."""
    counts = Counter(depths)
    return [sum(count for depth, count in counts.items() if depth > least) for least in range(max(counts, default=0))]


@dataclass
class Choice:
    """A text in progress; `predicted` are the tokens of the prediction that it has, `reasoning` those of its reasoning.

    `events` are what was said, thought and called, None where the text is all that there is.
    """

    number: int
    text: str = ""
    ids: list[int] = field(default_factory=list[int])
    predicted: int = 0
    finish: str = ""
    stopped_by: Any = None
    cached: int = 0
    reasoning: int = 0
    events: list[AnswerEvent] | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gains: list[StepGain] = field(default_factory=list[StepGain])

    def add(self, said: Mapping[str, Any]) -> None:
        """Take what a step brought."""
        count = len(said["tokens"])
        self.text += said["text"]
        self.ids += said["tokens"]
        self.predicted = said["predicted"]
        self.finish, self.stopped_by = said["finish"], said["stopped_by"]
        if "events" in said:
            self.events = self.events or []
            self.events += said["events"]
            self.reasoning = said["reasoning"]
        self.logprobs += said.get("logprobs", ())
        if count:
            self.gains.append(StepGain(count, *(said[name] for name in GAINED)))

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.ids)

    @property
    def said(self) -> list[AnswerEvent]:
        """What was said, thought and called."""
        return [AnswerEvent("content", self.text)] if self.events is None else self.events

    @property
    def reason(self) -> Finish | None:
        """Why it ended, as OpenAI says it; None if it has not: for its calls, where it was not cut off."""
        found = FINISHES.get(self.finish)
        called = found == "stop" and any(one.kind == "call" for one in self.events or ())
        return "tool_calls" if called else found


class OpenRequest:
    """A request in progress, with `n` choices of each prompt; `begun` is what the worker said when it took it."""

    def __init__(self, begun: Mapping[str, Any], n: int, level: str) -> None:
        self.begun, self.n, self.level = begun, n, level
        self.choices = [Choice(number) for number in range(len(begun["seeds"]))]
        self.resumed: list[Resumed] = []

    def add(self, kind: str, said: Mapping[str, Any]) -> Choice:
        """Take an event; return the choice that it is about."""
        choice = self.choices[said["number"]]
        if kind == "joined":
            choice.cached = said["cached"]
        else:
            choice.add(said)
            self.resumed += [said["resumed"]] if "resumed" in said else []
        return choice

    def echo(self, choice: Choice) -> Mapping[str, Any] | None:
        """Return the prompt that is told back before a choice; None if it is not."""
        return self.begun["echo"][choice.number // self.n] if "echo" in self.begun else None

    def prompt_told(self, number: int) -> ChatPrompt:
        """Return the tokens of the prompt of a choice, and their scores, where they are told."""
        told, place = ChatPrompt(), number // self.n
        if "prompt_ids" in self.begun:
            told["prompt_token_ids"] = self.begun["prompt_ids"][place]
        if "scores" in self.begun:
            told["prompt_logprobs"] = [_prompt_scores(one) for one in self.begun["scores"][place]]
        return told

    @property
    def over(self) -> bool:
        """Whether all texts have ended."""
        return all(choice.finish for choice in self.choices)

    @property
    def size(self) -> int:
        """About how many values an answer tells: tokens, and log-probabilities of theirs and of prompts'."""
        echoes = [len(one["tokens"]) + _values(one.get("logprobs", ())) for one in self.begun.get("echo", ())]
        own = sum(choice.tokens + _values(choice.logprobs) for choice in self.choices)
        scores = sum(_values(one) for one in self.begun.get("scores", ()))
        return own + self.n * (sum(echoes) + scores)

    @property
    def gains(self) -> list[StepGain]:
        """What the steps brought, of one choice behind another's."""
        return [gain for choice in self.choices for gain in choice.gains]

    @property
    def rule(self) -> Rule:
        """The rule that verifies drafts, None where nothing is written, and whether the text's law is the target's."""
        return {"verifier": self.begun["verifier"], "lossless": self.begun["lossless"]}

    @property
    def seeds(self) -> Seeds:
        """What every answer tells of its texts, however little else is told."""
        told: Seeds = {"seeds": list(self.begun["seeds"]), **self.rule}
        if "version" in self.begun:
            told["version"] = self.begun["version"]
        return {**told, "resumed": self.resumed} if self.resumed else told

    def usage(self) -> Usage:
        """Return the usage in OpenAI's shape.

        Tokens of a prediction are accepted if the text has them, whoever brought them, and rejected otherwise; with
        several texts each has the whole prediction. Counts of sources are of drafts, which the target's own tokens are
        not.
        """
        accepted = sum(choice.predicted for choice in self.choices)
        rejected = int(self.begun["prediction_tokens"]) * len(self.choices) - accepted
        prompt, new = sum(self.begun["prompt_tokens"]), sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in self.choices[:: self.n])},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning for choice in self.choices),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def metrics(self) -> Measures | None:
        """Return how drafts fared: all together, and each choice if there are several; None if that is not told."""
        if self.level == NONE:
            return None
        told: AllDraftCounts = {**self.rule, **draft_counts(self.gains, self.level)}
        if len(self.choices) > 1:
            told["choices"] = [draft_counts(choice.gains, self.level) for choice in self.choices]
        return {"speculative_decoding": told}


def _values(own: Sequence[Mapping[str, Any]]) -> int:
    """Return how many log-probabilities tokens have, with those of the likeliest; a prompt's first has none."""
    return len(own) * (1 + len(own[-1]["top"])) if own else 0


@dataclass(frozen=True)
class AnswerShape:
    """What an answer to one request looks like: its id, its model's name, and what it tells."""

    name: str
    model: str
    chat: bool
    logprobs: bool
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, tally: OpenRequest) -> bytes:
        """Return the answer when all texts have ended, as JSON.

        The choices are encoded one by one: nothing else runs in this process while one is.
        """
        choices = b",".join(as_json(self._choice(tally, choice)) for choice in tally.choices)
        ending: AnswerEnding = {"usage": tally.usage(), "metrics": tally.metrics(), "polydraft": tally.seeds}
        head = {**self._head(), **(tally.prompt_told(0) if self.chat else {})}
        return b"".join((as_json(head)[:-1], b',"choices":[', choices, b"],", as_json(ending)[1:]))

    def opening(self, tally: OpenRequest) -> Iterator[AnyChunk]:
        """Yield the chunks before the first token: of a chat who speaks, of an echo prompts, and tokens of prompts."""
        for choice in tally.choices:
            echo, prompt = tally.echo(choice), tally.prompt_told(choice.number)
            if self.chat:
                body = self._chat([_chat_chunk(choice.number, {"role": "assistant", "content": ""}, None, None)])
                _add_prompt(body, prompt)
                yield body
            elif echo is not None or prompt:
                told = _text_logprobs(echo["logprobs"]) if echo and self.logprobs else None
                piece = _text_chunk(choice.number, echo["text"] if echo else "", told, None)
                _add_prompt(piece, prompt)
                yield self._text([piece])

    def chunk(self, tally: OpenRequest, choice: Choice, said: Mapping[str, Any]) -> AnyChunk:
        """Return the chunk of what a step brought a choice."""
        reason, echo, own = choice.reason, tally.echo(choice), said.get("logprobs", ())
        if self.chat:
            plain: Delta = {"content": said["text"]} if said["text"] or not reason else {}
            delta = delta_of(said["events"]) if "events" in said else plain
            body = self._chat(
                [_chat_chunk(choice.number, delta, _chat_logprobs(own) if self.logprobs else None, reason)]
            )
        else:
            told = _text_logprobs(own, len(echo["text"]) if echo else 0) if self.logprobs else None
            body = self._text([_text_chunk(choice.number, said["text"], told, reason, choice.stopped_by)])
        if self.token_ids:
            body["choices"][0]["token_ids"] = said["tokens"]
        if "trace" in said:
            trace: Trace = {"index": choice.number}
            trace.update(said["trace"])
            body["polydraft"] = trace
        return body

    def closing(self, tally: OpenRequest) -> AnyChunk:
        """Return the last chunk, which has the usage and no choice."""
        body = self._chat([]) if self.chat else self._text([])
        body["usage"], body["metrics"] = tally.usage(), tally.metrics()
        return body

    def add_measures(self, body: AnyChunk, tally: OpenRequest, usage: bool) -> None:
        """Add what the last chunk of a text has beside, and what it tells of its step already.

        The counts of drafts stand in one chunk alone, since who reads them takes two for two texts: in the one with the
        `usage`, or here.
        """
        trace, own = body.get("polydraft") or Trace(), tally.seeds
        trace["seeds"], trace["verifier"], trace["lossless"] = own["seeds"], own["verifier"], own["lossless"]
        if "version" in own:
            trace["version"] = own["version"]
        if "resumed" in own:
            trace["resumed"] = own["resumed"]
        if not usage:
            body["metrics"] = tally.metrics()
        body["polydraft"] = trace

    def _head(self) -> TextHead | ChatHead:
        if self.chat:
            return {"id": self.name, "object": "chat.completion", "created": self.created, "model": self.model}
        return {"id": self.name, "object": "text_completion", "created": self.created, "model": self.model}

    def _text(self, choices: list[TextChoice]) -> CompletionChunk:
        return {
            "id": self.name,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chat(self, choices: list[ChatPiece]) -> ChatCompletionChunk:
        return {
            "id": self.name,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, tally: OpenRequest, choice: Choice) -> TextChoice | ChatChoice:
        told = self._chat_choice(choice) if self.chat else self._text_choice(tally, choice)
        if self.token_ids:
            told["token_ids"] = choice.ids
        return told

    def _chat_choice(self, choice: Choice) -> ChatChoice:
        return {
            "index": choice.number,
            "message": message_of(choice.said),
            "logprobs": _chat_logprobs(choice.logprobs) if self.logprobs else None,
            "finish_reason": choice.reason,
            "stop_reason": choice.stopped_by,
        }

    def _text_choice(self, tally: OpenRequest, choice: Choice) -> TextChoice:
        echo = tally.echo(choice) or {"text": "", "logprobs": ()}
        before = str(echo["text"])
        told = _text_logprobs(choice.logprobs, len(before), echo["logprobs"]) if self.logprobs else None
        found = _text_chunk(choice.number, before + choice.text, told, choice.reason, choice.stopped_by)
        _add_prompt(found, tally.prompt_told(choice.number))
        return found


def as_json(value: Mapping[str, object]) -> bytes:
    """Return a value as JSON."""
    told = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return told.encode("utf-8", "replace")


def _text_chunk(
    number: int, text: str, logprobs: TextLogprobs | None, reason: Finish | None, stopped_by: int | str | None = None
) -> TextChoice:
    return {
        "index": number,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stopped_by,
    }


def _chat_chunk(number: int, delta: Delta, logprobs: ChatLogprobs | None, reason: Finish | None) -> ChatPiece:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text_logprobs(
    own: Sequence[Mapping[str, Any]], before: int = 0, prompt: Sequence[Mapping[str, Any]] = ()
) -> TextLogprobs:
    """Return the log-probabilities of a prompt, whose first token has none, and of tokens behind so many characters."""
    told = [*prompt, *own]
    return {
        "tokens": [one["text"] for one in told],
        "token_logprobs": [one["logprob"] for one in told],
        "top_logprobs": [None if one["logprob"] is None else _by_text(one) for one in told],
        "text_offset": [one["offset"] for one in prompt] + [before + one["offset"] for one in own],
    }


def _add_prompt(told: TextChoice | ChatCompletionChunk, prompt: ChatPrompt) -> None:
    if "prompt_token_ids" in prompt:
        told["prompt_token_ids"] = prompt["prompt_token_ids"]
    if "prompt_logprobs" in prompt:
        told["prompt_logprobs"] = prompt["prompt_logprobs"]


def _prompt_scores(one: Mapping[str, Any]) -> dict[str, PromptScore] | None:
    """Return a prompt's token and the likeliest in its place, as vLLM has them; of the first token there are none."""
    if one["logprob"] is None:
        return None
    told = {str(one["token"]): PromptScore(logprob=one["logprob"], rank=one["rank"], decoded_token=one["text"])}
    for rank, (token, (text, _, value)) in enumerate(zip(one["ids"], one["top"], strict=False), 1):
        told.setdefault(str(token), PromptScore(logprob=value, rank=rank, decoded_token=text))
    return told


def _by_text(one: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text, _, value in one["top"]:
        found.setdefault(text, value)  # the likelier of two tokens with one text, such as halves of characters
    return found


def _chat_logprobs(own: Sequence[Mapping[str, Any]]) -> ChatLogprobs:
    return {
        "content": [
            {**_top(one["text"], one["bytes"], one["logprob"]), "top_logprobs": [_top(*given) for given in one["top"]]}
            for one in own
        ]
    }


def _top(text: str, own: list[int], value: float) -> Top:
    return {"token": text, "logprob": value, "bytes": own}
