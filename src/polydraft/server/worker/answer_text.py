"""What a step brought a text, as plain values: its text, log-probabilities, and the tree it came from."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from polydraft.drafters import Followed
from polydraft.engine import Block, Emission
from polydraft.machine_code import clock
from polydraft.models import StreamDecoder
from polydraft.server.worker.asking import TextRequest
from polydraft.server.worker.served import LoadedModels

LEAST = -9999.0
"""What is told of a token that the model rules out: JSON has no infinity."""
TARGET = "target"
"""Where tokens come from that nobody drafted."""


class AnswerText:
    """Turn what a text gains into what is told of it; a text ends at a stop string before the engine knows.

    Args:
        served: the model.
        wanted: the text.
    """

    def __init__(self, served: LoadedModels, wanted: TextRequest) -> None:
        self.served, self.ask, self.begun = served, wanted.ask, clock()
        self.trace = wanted.ask.speculation.trace
        self._decoder = StreamDecoder(
            served.tokenizer,
            wanted.ask.stop,
            skip_special_tokens=not wanted.ask.special,
            include_stop=wanted.ask.stop_included,
            least=wanted.ask.min_tokens,
        )
        self._followed = Followed(wanted.prediction) if wanted.prediction else None
        self._steps = self._tokens = self._drafted = self._accepted = 0
        self._length = 0  # characters that were told
        self._unplaced = deque[dict[str, Any]]()  # log-probabilities of tokens whose place is not certain
        self._offered_at: list[int] = []
        self._kept_at: list[int] = []

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
        self._count(gain, count, accepted)
        told: dict[str, Any] = {
            "text": "".join(pieces),
            "tokens": list(gain.tokens[:count]),
            "drafted": gain.drafted,
            "accepted": accepted,
            "offered": gain.offered,
            "kept": gain.kept,
            "depth": _deepest(block, row) if gain.drafted else 0,
            "predicted": self._followed.accepted if self._followed else 0,
            "source": gain.source,
            "finish": finish,
            "stopped_by": stopped if stopped is not None else self._stop_token(gain, finish),
        }
        if self.ask.logprobs is not None:
            self._length += len(told["text"])
            self._unplaced += map(self._logprob, gain.logprobs[:count])
            told["logprobs"] = self._placed(over=bool(finish))
        if self.trace:
            told["trace"] = self._traced(gain, block, row, pieces, accepted)
        return told

    def _stop_token(self, gain: Emission, finish: str) -> int | None:
        """Return the token of the request's own at which the text ended."""
        return gain.tokens[-1] if finish == "eos" and gain.tokens[-1] in self.ask.stop_tokens else None

    def _count(self, gain: Emission, count: int, accepted: int) -> None:
        self._steps, self._tokens = self._steps + 1, self._tokens + count
        self._drafted, self._accepted = self._drafted + gain.drafted, self._accepted + accepted
        for totals, reached in ((self._offered_at, gain.offered), (self._kept_at, gain.kept)):
            totals += [0] * (reached - len(totals))
            for depth in range(reached):
                totals[depth] += 1

    def _logprob(self, one: Any) -> dict[str, Any]:
        most = self.ask.logprobs or 0
        return spelt(self.served, one.token, one.logprob, one.top[:most])

    def _placed(self, *, over: bool) -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens that begin no later than what was told, with their places in the text.

        Where others begin is certain later: their text may be cut off by a stop string, or be part of a character.
        """
        begins, found = self._decoder.begins, list[dict[str, Any]]()
        while self._unplaced:
            number = self._tokens - len(self._unplaced)
            begin = begins[number] if number < len(begins) else self._length  # an end of text has none of its own
            if begin > self._length and not over:
                break
            found.append(self._unplaced.popleft() | {"offset": min(begin, self._length)})
        return found

    def _traced(self, gain: Emission, block: Block, row: int, pieces: Sequence[str], accepted: int) -> dict[str, Any]:
        """Return what a page shows of a step."""
        elapsed = clock() - self.begun
        tokens = [
            {"id": token, "text": text, "origin": (gain.source or TARGET) if place < accepted else TARGET}
            for place, (token, text) in enumerate(zip(gain.tokens, pieces, strict=False))
        ]
        return {
            "step": self._steps,
            "source": gain.source,
            "tokens": tokens,
            "tree": _tree(self.served, block, row),
            "elapsed": round(elapsed, 6),
            "tokens_per_second": round(self._tokens / elapsed, 3) if elapsed else None,
            "tokens_per_call": round(self._tokens / self._steps, 4),
            "drafted": self._drafted,
            "accepted": self._accepted,
            "acceptance_by_depth": by_depth(self._offered_at, self._kept_at),
        }


def _deepest(block: Block, row: int) -> int:
    """Return how many drafts the longest path of a row's tree has."""
    return int((block.tree.depth[row] * block.tree.valid[row]).max())


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


def by_depth(offered: Sequence[int], kept: Sequence[int]) -> list[float]:
    """Return the acceptance rate at depth 1, 2, ..., each given that all depths before were accepted."""
    padded = [*kept, *[0] * (len(offered) - len(kept))]
    return [round(one / of, 4) for one, of in zip(padded, offered, strict=False)]


def spelt(served: LoadedModels, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return a token's log-probability and those of the likeliest in its place, with their texts and bytes."""
    return {
        "token": token,
        "text": served.spelling(token),
        "bytes": served.bytes(token),
        "logprob": max(logprob, LEAST),
        "top": [(served.spelling(other), served.bytes(other), max(value, LEAST)) for other, value in top],
    }


def nothing() -> dict[str, Any]:
    """Return what is told of a text that is to have no tokens."""
    counts = dict.fromkeys(("drafted", "accepted", "offered", "kept", "depth", "predicted"), 0)
    return {"text": "", "tokens": [], **counts, "source": "", "finish": "length", "stopped_by": None}
