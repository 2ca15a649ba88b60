"""Answers in OpenAI's shapes, whole and in chunks."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.server.wire.answer_types import (
    AnswerEnding,
    ChatChoice,
    ChatCompletionChunk,
    ChatHead,
    ChatLogprobs,
    ChatPiece,
    ChatToken,
    CompletionChunk,
    Delta,
    Finish,
    Seeds,
    TextChoice,
    TextHead,
    TextLogprobs,
    Top,
    Trace,
)
from polydraft.server.wire.tallies import Choice, OpenRequest

AnyChunk = CompletionChunk | ChatCompletionChunk


@dataclass(frozen=True)
class AnswerShape:
    """What an answer to one request looks like.

    Args:
        name: the answer's id.
        model: what the model is called.
        chat: whether it is a chat.
        logprobs: whether log-probabilities are told.
        created: when, in seconds since 1970.
    """

    name: str
    model: str
    chat: bool
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, tally: OpenRequest) -> bytes:
        """Return the answer when all texts have ended, as JSON.

        The choices are encoded one by one: nothing else runs in this process while one is.
        """
        choices = b",".join(as_json(self._choice(tally, choice)) for choice in tally.choices)
        head = as_json(self._head())
        ending: AnswerEnding = {"usage": tally.usage(), "metrics": tally.metrics(), "polydraft": _seeds(tally)}
        rest = as_json(ending)
        return b"".join((head[:-1], b',"choices":[', choices, b"],", rest[1:]))

    def opening(self, tally: OpenRequest) -> Iterator[AnyChunk]:
        """Yield the chunks before the first token: of a chat who speaks, of an echo the prompts."""
        for choice in tally.choices if self.chat else ():
            yield self._chat([_chat_chunk(choice.number, {"role": "assistant", "content": ""}, None, None)])
        for choice in tally.choices if "echo" in tally.begun else ():
            echo = tally.begun["echo"][choice.number // tally.n]
            told = _text_logprobs(echo["logprobs"], 0) if self.logprobs else None
            yield self._text([_text_chunk(choice.number, echo["text"], told, None)])

    def chunk(self, choice: Choice, said: Mapping[str, Any], before: int) -> AnyChunk:
        """Return the chunk of a step.

        Args:
            choice: the text, with the step.
            said: what the step brought.
            before: characters of the answer before the model's own: those of an echo.
        """
        reason = choice.reason
        if self.chat:
            delta: Delta = {"content": said["text"]} if said["text"] or not reason else {}
            told = _chat_logprobs(said.get("logprobs", ())) if self.logprobs else None
            body = self._chat([_chat_chunk(choice.number, delta, told, reason)])
        else:
            told = _text_logprobs(said.get("logprobs", ()), before) if self.logprobs else None
            body = self._text([_text_chunk(choice.number, said["text"], told, reason, choice.stopped_by)])
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
        trace, own = body.get("polydraft") or Trace(), _seeds(tally)
        trace["seeds"], trace["verifier"], trace["lossless"] = own["seeds"], own["verifier"], own["lossless"]
        if not usage:
            body["metrics"] = tally.metrics()
        body["polydraft"] = trace

    def begins(self, tally: OpenRequest, number: int) -> int:
        """Return how many characters of a choice come before the model's own: those of an echo."""
        return len(tally.begun["echo"][number // tally.n]["text"]) if "echo" in tally.begun else 0

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
        if self.chat:
            told = _chat_logprobs(choice.logprobs) if self.logprobs else None
            return {
                "index": choice.number,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": told,
                "finish_reason": choice.reason,
                "stop_reason": choice.stopped_by,
            }
        echo = tally.begun["echo"][choice.number // tally.n] if "echo" in tally.begun else None
        before = "" if echo is None else str(echo["text"])
        told = _text_logprobs(choice.logprobs, len(before)) if self.logprobs else None
        if told is not None and echo is not None:
            told = _joined(_text_logprobs(echo["logprobs"], 0), told)
        text = before + choice.text
        return _text_chunk(choice.number, text, told, choice.reason, choice.stopped_by)


def _seeds(tally: OpenRequest) -> Seeds:
    """Return what every answer tells of its texts, however little else is told."""
    return {"seeds": list(tally.begun["seeds"]), **tally.rule}


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


def _text_logprobs(own: Sequence[Mapping[str, Any]], before: int) -> TextLogprobs:
    """Return log-probabilities as completions have them; of a prompt's first token there is none.

    Args:
        own: what was found of each token, with its place in the text that it belongs to.
        before: characters of the answer before that text.
    """
    return {
        "tokens": [one["text"] for one in own],
        "token_logprobs": [one["logprob"] for one in own],
        "top_logprobs": [None if one["logprob"] is None else _by_text(one) for one in own],
        "text_offset": [before + one["offset"] for one in own],
    }


def _joined(first: TextLogprobs, then: TextLogprobs) -> TextLogprobs:
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + then["top_logprobs"],
        "text_offset": first["text_offset"] + then["text_offset"],
    }


def _by_text(one: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text, _, value in one["top"]:
        found.setdefault(text, value)  # the likelier of two tokens with one text, such as halves of characters
    return found


def _chat_logprobs(own: Sequence[Mapping[str, Any]]) -> ChatLogprobs:
    """Return log-probabilities as chats have them."""
    return {"content": [_chat_token(one) for one in own]}


def _chat_token(one: Mapping[str, Any]) -> ChatToken:
    return {**_top(one["text"], one["bytes"], one["logprob"]), "top_logprobs": [_top(*given) for given in one["top"]]}


def _top(text: str, own: list[int], value: float) -> Top:
    return {"token": text, "logprob": value, "bytes": own}
