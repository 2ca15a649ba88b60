"""Answers in OpenAI's shapes, whole and in chunks."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polydraft.server.wire.tallies import Choice, Tally


@dataclass(frozen=True)
class Shape:
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

    def whole(self, tally: Tally) -> bytes:
        """Return the answer when all texts have ended, as JSON.

        The choices are encoded one by one: nothing else runs in this process while one is.
        """
        choices = b",".join(as_json(self._choice(tally, choice)) for choice in tally.choices)
        head = as_json(self._head("chat.completion" if self.chat else "text_completion"))
        rest = as_json({"usage": tally.usage(), "metrics": tally.metrics(), "polydraft": _always(tally)})
        return b"".join((head[:-1], b',"choices":[', choices, b"],", rest[1:]))

    def opening(self, tally: Tally) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token: of a chat who speaks, of an echo the prompts."""
        for choice in tally.choices if self.chat else ():
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([_chat_chunk(choice.number, delta, None, None)])
        for choice in tally.choices if "echo" in tally.begun else ():
            echo = tally.begun["echo"][choice.number // tally.n]
            told = _text_logprobs(echo["logprobs"], 0) if self.logprobs else None
            yield self._chunk([_text_chunk(choice.number, echo["text"], told, None)])

    def chunk(self, choice: Choice, said: Mapping[str, Any], before: int) -> dict[str, Any]:
        """Return the chunk of a step.

        Args:
            choice: the text, with the step.
            said: what the step brought.
            before: characters of the answer before the model's own: those of an echo.
        """
        reason = choice.reason
        if self.chat:
            delta = {"content": said["text"]} if said["text"] or not reason else {}
            told = _chat_logprobs(said.get("logprobs", ())) if self.logprobs else None
            body = self._chunk([_chat_chunk(choice.number, delta, told, reason)])
        else:
            told = _text_logprobs(said.get("logprobs", ()), before) if self.logprobs else None
            body = self._chunk([_text_chunk(choice.number, said["text"], told, reason, choice.stopped_by)])
        if "trace" in said:
            body["polydraft"] = {"index": choice.number, **said["trace"]}
        return body

    def closing(self, tally: Tally) -> dict[str, Any]:
        """Return the last chunk, which has the usage and no choice."""
        return {**self._chunk([]), "usage": tally.usage(), "metrics": tally.metrics()}

    def measures(self, tally: Tally, told: Mapping[str, Any], usage: bool) -> dict[str, Any]:
        """Return what the last chunk of a text has beside, and what it tells of its step already.

        The counts of drafts stand in one chunk alone, since who reads them takes two for two texts: in the one with the
        `usage`, or here.
        """
        metrics = {} if usage else {"metrics": tally.metrics()}
        return {**metrics, "polydraft": {**told, **_always(tally)}}

    def begins(self, tally: Tally, number: int) -> int:
        """Return how many characters of a choice come before the model's own: those of an echo."""
        return len(tally.begun["echo"][number // tally.n]["text"]) if "echo" in tally.begun else 0

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk" if self.chat else "text_completion"), "choices": choices}

    def _choice(self, tally: Tally, choice: Choice) -> dict[str, Any]:
        if self.chat:
            told = _chat_logprobs(choice.logprobs) if self.logprobs else None
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            return {
                "index": choice.number,
                "message": message,
                "logprobs": told,
                "finish_reason": choice.reason,
                "stop_reason": choice.stopped_by,
            }
        echo = tally.begun["echo"][choice.number // tally.n] if "echo" in tally.begun else None
        before = "" if echo is None else str(echo["text"])
        told = _text_logprobs(choice.logprobs, len(before)) if self.logprobs else None
        if told is not None and echo is not None:
            told = {name: value + told[name] for name, value in _text_logprobs(echo["logprobs"], 0).items()}
        text = before + choice.text
        return _text_chunk(choice.number, text, told, choice.reason, choice.stopped_by)


def _always(tally: Tally) -> dict[str, Any]:
    """Return what every answer tells of its texts, however little else is told."""
    return {"seeds": list(tally.begun["seeds"]), **tally.rule}


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return a value as JSON."""
    told = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return told.encode("utf-8", "replace")


def _text_chunk(number: int, text: str, logprobs: Any, reason: str | None, stopped_by: Any = None) -> dict[str, Any]:
    return {
        "index": number,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": reason,
        "stop_reason": stopped_by,
    }


def _chat_chunk(number: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text_logprobs(own: Sequence[Mapping[str, Any]], before: int) -> dict[str, Any]:
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


def _by_text(one: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text, _, value in one["top"]:
        found.setdefault(text, value)  # the likelier of two tokens with one text, such as halves of characters
    return found


def _chat_logprobs(own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return log-probabilities as chats have them."""
    return {"content": [{**_said(one["text"], one["bytes"], one["logprob"]), "top_logprobs": _top(one)} for one in own]}


def _top(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_said(*given) for given in one["top"]]


def _said(text: str, own: Sequence[int], value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": own}
