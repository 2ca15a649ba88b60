"""What is told of a text, as plain values: what each step brought it, and its prompt where that is told back."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from polydraft.drafters import Followed
from polydraft.engine import Block, Emission, Statistics
from polydraft.machine_code import clock
from polydraft.models import AnswerEvent, AnswerReader, StreamDecoder, cache_in
from polydraft.server.worker.asking import TextRequest
from polydraft.server.worker.asks import Ask
from polydraft.server.worker.served import LoadedModels

LEAST = -9999.0
"""What is told of a token that the model rules out: JSON has no infinity."""
CUT = ("length", "context")
"""Why a text ends that the model had not ended."""
TARGET = "target"
"""Where tokens come from that nobody drafted."""
GRAMMAR = "grammar"
"""Where tokens come from that a grammar forces."""
SCORED = 256
"""Rows of log-probabilities that are in double precision at a time."""


class AnswerText:
    """Turn what a text gains into what is told of it; a text ends at a stop string before the engine knows."""

    def __init__(self, served: LoadedModels, wanted: TextRequest) -> None:
        self.served, self.ask, self.begun = served, wanted.ask, clock()
        self._decoder = StreamDecoder(
            served.tokenizer,
            wanted.ask.stop,
            skip_special_tokens=not wanted.ask.special,
            include_stop=wanted.ask.stop_included,
            least=wanted.ask.min_tokens,
            shown=wanted.form.seen if wanted.form else frozenset(),
        )
        told = wanted.ask.told
        self._form, self._thoughts = wanted.form, 0
        self._reader = wanted.form.reader(partial(_call_id, wanted)) if wanted.form else None
        self._followed = Followed(wanted.prediction).on(told) if wanted.prediction else None
        self._steps, self._count = 0, len(told)  # steps that were told, and the tokens of the text
        self._statistics = Statistics()  # of a text whose steps are traced
        before = [self._decoder.add(token) for token in told]
        if self._reader is not None:
            self._read(self._reader, before, None)
        self._length = sum(map(len, before))  # characters that were told
        self._unplaced = deque(map(dict, wanted.ask.unplaced))  # log-probabilities of tokens whose place is uncertain

    @property
    def fresh(self) -> bool:
        """Whether nothing was told yet."""
        return not self._steps

    def gained(self, gain: Emission, block: Block, row: int) -> dict[str, Any]:
        """Return what is told of a step; with a "finish" where the text ends."""
        pieces: list[str] = []
        for token in gain.tokens:
            last = gain.finish == "eos" and len(pieces) == len(gain.tokens) - 1
            pieces.append("" if last and not self.ask.special else self._decoder.add(token))
            if self._decoder.stopped is not None:
                break
        if gain.finish and self._decoder.stopped is None:
            pieces[-1] += self._decoder.rest()  # which may be what completes a stop string
        stopped = self._decoder.stopped
        finish = "stop" if stopped is not None else gain.finish
        count = len(pieces)
        accepted = min(gain.accepted, count)
        if self._followed is not None:
            self._followed = self._followed.on(gain.tokens[:count])
        shown = replace(gain, tokens=gain.tokens[:count], accepted=accepted, forced=min(gain.forced, count - accepted))
        self._steps, self._count = self._steps + 1, self._count + count
        told: dict[str, Any] = {
            "text": "".join(pieces),
            "tokens": list(shown.tokens),
            "drafted": gain.drafted,
            "accepted": accepted,
            "offered": gain.offered,
            "kept": gain.kept,
            "depth": _deepest(block, row, gain.drafted) if gain.drafted else 0,
            "predicted": self._followed.accepted if self._followed else 0,
            "source": gain.source,
            "finish": finish,
            "stopped_by": stopped,
        }
        if self._reader is not None:
            told |= self._read(self._reader, pieces, finish)
        if finish == "eos" and gain.tokens[-1] in self.ask.stop_tokens:
            told["stopped_by"] = gain.tokens[-1]
        if self.ask.logprobs is not None:
            self._length += len(told["text"])
            for one in gain.logprobs[:count]:
                self._unplaced.append(spelt(self.served, one.token, one.logprob, one.top[: self.ask.logprobs]))
            told["logprobs"] = self._placed(over=bool(finish))
            told["unplaced"] = list(self._unplaced)
        if self.ask.speculation.trace:
            self._statistics.add(replace(block, rows={row: shown}))
            told["trace"] = self._traced(shown, block, row, pieces)
        return told

    def _read(self, reader: AnswerReader, pieces: Sequence[str], finish: str | None) -> dict[str, Any]:
        """Return what was said, thought and called in pieces of the text, one for each token."""
        events = list[AnswerEvent]()
        for piece in pieces:
            before = reader.thinks
            events += reader.feed(piece)
            self._thoughts += before or reader.thinks
        events += reader.finish(cut=finish in CUT) if finish else ()
        own = self._form and self._form.tool_format
        return {"events": events, "reasoning": self._thoughts, "format": own.name if own else ""}

    def _placed(self, *, over: bool) -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens that begin no later than what was told, with their places in the text.

        Where others begin is certain later: their text may be cut off by a stop string, or be part of a character.
        """
        begins, found = self._decoder.begins, list[dict[str, Any]]()
        while self._unplaced:
            number = self._count - len(self._unplaced)
            begin = begins[number] if number < len(begins) else self._length  # an end of text has none of its own
            if begin > self._length and not over:
                break
            found.append(self._unplaced.popleft() | {"offset": min(begin, self._length)})
        return found

    def _traced(self, gain: Emission, block: Block, row: int, pieces: Sequence[str]) -> dict[str, Any]:
        elapsed, all_steps = clock() - self.begun, self._statistics
        origins = [gain.source or TARGET] * gain.accepted + [GRAMMAR] * gain.forced + [TARGET]
        tokens = [
            {"id": token, "text": text, "origin": origin}
            for token, text, origin in zip(gain.tokens, pieces, origins, strict=False)
        ]
        return {
            "step": all_steps.steps,
            "source": gain.source,
            "tokens": tokens,
            "tree": _tree(self.served, block, row),
            "elapsed": round(elapsed, 6),
            "tokens_per_second": round(all_steps.new_tokens / elapsed, 3) if elapsed else None,
            "tokens_per_call": round(all_steps.block_efficiency, 4),
            "drafted": all_steps.drafted,
            "accepted": all_steps.accepted,
            "acceptance_by_depth": [round(rate, 4) for rate in all_steps.acceptance_by_depth],
        }


def _deepest(block: Block, row: int, drafted: int) -> int:
    """Return the depth of a row's deepest draft; what a grammar forces has its nodes behind those of the drafts."""
    valid = block.tree.valid[row]
    return int((block.tree.depth[row] * (valid & (valid.cumsum(0) <= 1 + drafted))).max())


def _tree(served: LoadedModels, block: Block, row: int) -> dict[str, Any]:
    """Return a row's tree, with its nodes' numbers as the engine has them: 0 is the root."""
    tree, verdict = block.tree, block.verdict
    ids = tree.tokens[row].tolist()
    path = verdict.path[row, : verdict.kept[row]].tolist()
    following = int(verdict.next_token[row])
    return {
        "ids": ids,
        "tokens": [served.spelling(token) if 0 <= token < served.vocab_size else "" for token in ids],
        "parents": tree.parents[row].tolist(),
        "depth": tree.depth[row].tolist(),
        "valid": tree.valid[row].tolist(),
        "accepted": path,
        "next": served.spelling(following),
    }


def spelt(served: LoadedModels, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return a token's log-probability and those of the likeliest in its place, with their texts and bytes."""
    return {
        "token": token,
        "text": served.spelling(token),
        "bytes": served.bytes(token),
        "logprob": max(logprob, LEAST),
        "top": [(served.spelling(other), served.bytes(other), max(value, LEAST)) for other, value in top],
    }


def _with_fewer(echo: dict[str, Any], most: int | None) -> dict[str, Any]:
    """Return a prompt that is told back with so many of the likeliest tokens in each place; None for no scores."""
    rest = {name: value for name, value in echo.items() if name != "logprobs"}
    if most is None:
        return rest
    return {**rest, "logprobs": [{**one, "top": one["top"][:most]} for one in echo["logprobs"]]}


def _call_id(wanted: TextRequest, index: int, name: str) -> str:
    """Return the id of a call, which no other request's has; as the format wants it."""
    own = wanted.form and wanted.form.tool_format
    form = own.id_form if own else "call"
    if form == "counted":
        return f"functions.{name}:{index}"
    drawn = sha256(f"{wanted.ask.name} {wanted.number} {index}".encode()).hexdigest()
    return drawn[:9] if form == "short" else f"call_{drawn[:24]}"


def nothing() -> dict[str, Any]:
    """Return what is told of a text that is to have no tokens."""
    counts = dict.fromkeys(("drafted", "accepted", "offered", "kept", "depth", "predicted"), 0)
    return {"text": "", "tokens": [], **counts, "source": "", "finish": "length", "stopped_by": None}


class Echo:
    """A request whose prompts are told; every `step` reads as much of one as a chunk has, and nobody waits for more.

    When they are read, `begun` is to be said of the request, and `found` has what was found of each prompt.
    """

    def __init__(self, served: LoadedModels, ask: Ask, texts: Sequence[TextRequest], begun: Mapping[str, Any]) -> None:
        self.served, self.ask, self.texts, self.begun = served, ask, texts, begun
        self.told: list[dict[str, Any]] = []
        self._left = self._steps()

    def step(self) -> bool:
        """Read on; tell whether there is no more to read."""
        return next(self._left, None) is None

    @property
    def found(self) -> dict[str, Any]:
        """What was found of each prompt: what is told back before a text, and the scores of its tokens."""
        found: dict[str, Any] = {}
        if self.ask.echo:
            found["echo"] = [_with_fewer(one, self.ask.logprobs) for one in self.told]
        if self.ask.prompt_logprobs is not None:
            most = self.ask.prompt_logprobs
            found["scores"] = [_with_fewer(one, most)["logprobs"] for one in self.told]
        return found

    def _steps(self) -> Iterator[bool]:
        """Go through the prompts, with a stop behind every chunk but the last."""
        for place, one in enumerate(self.texts[:: self.ask.n]):
            if place:
                yield True
            echo = {"text": self.served.text(one.tokens, skip=not self.ask.special), "tokens": list(one.tokens)}
            if self.ask.scored is not None:
                first = one.tokens[0]
                echo["logprobs"] = [{"token": first, "text": self.served.spelling(first), "logprob": None, "top": []}]
                decoder = StreamDecoder(self.served.tokenizer, skip_special_tokens=not self.ask.special)
                decoder.add(first)
                for chunk in self._chunks(one.tokens):
                    echo["logprobs"] += chunk
                    decoder.add([told["token"] for told in chunk])
                    if len(echo["logprobs"]) < len(one.tokens):
                        yield True
                for told, begin in zip(echo["logprobs"], decoder.begins, strict=True):
                    told["offset"] = min(begin, len(echo["text"]))
            self.told.append(echo)

    def _chunks(self, tokens: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        """Yield the log-probabilities of the tokens behind the first, each given those before it.

        A model that gives nothing back to go on from reads the whole at once.
        """
        given = torch.tensor([list(tokens)], device=self.served.target.device)
        last, size = len(tokens) - 1, self.served.settings.chunk
        begin, past = 0, None
        while begin < last:
            end = min(begin + size, last)
            logits, past = self._passed(given[:, begin:end], past, keeps=end < last)
            if past is None and end < last:
                begin, end = 0, last
                logits, past = self._passed(given[:, :last], None, keeps=False)
            yield self._scored(logits, given[0, begin + 1 : end + 1])
            begin = end

    @torch.inference_mode()
    def _passed(self, tokens: torch.Tensor, past: Any, *, keeps: bool) -> tuple[torch.Tensor, Any]:
        """Return the logits of a pass behind what was read, and what the next one may go on from."""
        before = {} if past is None else {self.served.target.cached_as: past}
        output = self.served.target.model(input_ids=tokens, use_cache=keeps or past is not None, **before)
        after = cache_in(output)
        return output.logits[0], past if after is None else after

    @torch.inference_mode()
    def _scored(self, logits: torch.Tensor, after: torch.Tensor) -> list[dict[str, Any]]:
        told, top = list[dict[str, Any]](), self.ask.scored or 0
        for some, tokens in zip(logits.split(SCORED), after.split(SCORED), strict=True):
            rows = some.double().log_softmax(dim=-1)
            values, ids = (found.tolist() for found in rows.topk(min(top, rows.shape[-1]), dim=-1))
            own = rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
            likeliest = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            spellings = [spelt(self.served, *one) for one in zip(tokens.tolist(), own, likeliest, strict=True)]
            if self.ask.prompt_logprobs is not None:  # which name tokens by their numbers, and say their ranks
                ranks = (rows > rows.gather(-1, tokens.unsqueeze(-1))).sum(dim=-1) + 1
                for one, rank, likely in zip(spellings, ranks.tolist(), ids, strict=True):
                    one.update(rank=rank, ids=likely)
            told += spellings
        return told
