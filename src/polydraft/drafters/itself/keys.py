"""Which of its keys a target sees when it drafts for itself: the newest, or those that it has looked at.

**What a choice may read**: keys of committed tokens, and queries that finished steps have left. The drafts of a step
then have a law that is fixed before the first of them is drawn, and which keys it sees is no choice by what was drawn.
Slots behind the committed text hold keys of tokens that were drawn, also those of a step that was interrupted and is
taken again with the same random numbers: who reads them makes drafts depend on their own draws.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d

from polydraft.errors import InvalidParameter, is_whole, shown

ROOM = 256
"""So many tokens follow before keys are chosen anew: on SmolLM2 a choice then takes 1.5 % of plain decoding."""
WINDOW = 32
"""How many of the newest tokens are always kept, and asked what they look at."""
NEIGHBOURS = 5
"""Over how many neighbouring keys attention is averaged."""


@runtime_checkable
class Keys(Protocol):
    """Chooses keys of a text, for each layer and head of keys by itself."""

    @property
    def budget(self) -> int:
        """How many keys are chosen at most; a text that has no more keeps all."""
        ...

    @property
    def room(self) -> int:
        """How many tokens follow before keys are chosen anew."""
        ...

    @property
    def queries(self) -> int:
        """Of how many of the newest tokens queries are read; 0 for none."""
        ...

    def slots(self, known: int, keys: Float[Tensor, "k m e"], queries: Float[Tensor, "k g q e"]) -> Int[Tensor, "#k s"]:
        """Return the slots that each head of a layer keeps, rising, the same number for all; or one row for all.

        Args:
            known: how many tokens are committed and have keys, more than the budget.
            keys: theirs.
            queries: those of the newest tokens, by the head of keys that they share, times what scores are multiplied
                by.
        """
        ...


@dataclass(frozen=True)
class Recent:
    """Choose a text's first tokens, to which attention flows whatever they are, and its newest.

    Args:
        sinks: how many of the first.
        window: how many of the newest.
        room: how many tokens follow before keys are chosen anew.

    Source: Xiao et al., arXiv 2309.17453 (StreamingLLM); as drafts, arXiv 2408.11049 (MagicDec). Keys keep the places
    that they have in the text.

    Raises:
        InvalidParameter: a number is too small.
    """

    sinks: int = 16
    window: int = 240
    room: int = ROOM
    queries = 0

    def __post_init__(self) -> None:
        _check(sinks=(self.sinks, 0), window=(self.window, 1), room=(self.room, 1))

    @property
    def budget(self) -> int:
        """The keys of both."""
        return self.sinks + self.window

    def slots(self, known: int, keys: Float[Tensor, "k m e"], queries: Float[Tensor, "k g q e"]) -> Int[Tensor, "1 s"]:
        """Return the same slots for all heads."""
        slots = torch.arange(known - self.budget, known, device=keys.device)
        slots[: self.sinks] = torch.arange(self.sinks, device=keys.device)
        return slots.unsqueeze(0)


@dataclass(frozen=True)
class Snap:
    """Choose the keys that the newest tokens look at, and these tokens' own.

    Rule: with w = `WINDOW` newest tokens (half the budget at most), a_t(j) the attention of token t of them to key j,
    and s(j) the mean over the 5 keys around j of sum_t a_t(j), summed over the heads that share a head of keys: the
    budget - w keys before the window with the largest s, and the window.

    Args:
        budget: how many keys.
        room: how many tokens follow before keys are chosen anew, so that the choice keeps up with the text.

    Source: Li et al., arXiv 2404.14469 (SnapKV), `update_kv` in FasterDecoding/SnapKV, which chooses once, for each
    head of queries; as drafts with one choice for a group, arXiv 2408.11049 (MagicDec).

    Raises:
        InvalidParameter: a number is too small.
    """

    budget: int = 512
    room: int = ROOM
    queries = WINDOW

    def __post_init__(self) -> None:
        _check(budget=(self.budget, 1), room=(self.room, 1))

    def slots(self, known: int, keys: Float[Tensor, "k m e"], queries: Float[Tensor, "k g q e"]) -> Int[Tensor, "k s"]:
        """Return the slots of each head of keys."""
        return _looked_at(self.budget, known, keys, queries, NEIGHBOURS)


@dataclass(frozen=True)
class Mass:
    """Choose the keys to which verification's attention flows, and the newest.

    Rule: that of `Snap` without the mean over neighbours. Queries are those of the newest tokens, each of which was
    read by a prompt's pass or verified, and keys are chosen anew more often: every few steps.

    Args:
        budget: how many keys.
        room: how many tokens follow before keys are chosen anew; a choice costs what 32 nodes cost in attention.

    Source: arXiv 2512.01278 (SparseSpec), `get_select_metadata` in sspec-project/SparseSpec. There the budget is 5 % of
    the text, queries are all of the last verification, rejected ones too, and every verification of 16 drafts chooses.

    Raises:
        InvalidParameter: a number is too small.
    """

    budget: int = 512
    room: int = 64
    queries = WINDOW

    def __post_init__(self) -> None:
        _check(budget=(self.budget, 1), room=(self.room, 1))

    def slots(self, known: int, keys: Float[Tensor, "k m e"], queries: Float[Tensor, "k g q e"]) -> Int[Tensor, "k s"]:
        """Return the slots of each head of keys."""
        return _looked_at(self.budget, known, keys, queries, 1)


@dataclass(frozen=True)
class Chunks:
    """Choose chunks of neighbouring keys whose mean the newest token looks at.

    Rule: of all whole chunks of c keys the first one, and those with the largest product of the mean key with the
    newest known token's query, summed over the heads that share a head of keys; with them the keys behind the last
    whole chunk.

    Args:
        budget: how many keys at most.
        size: c.
        room: how many tokens follow before keys are chosen anew.

    Source: Sun et al., arXiv 2404.11912 (TriForce), `init_graph_cache` in Infini-AI-Lab/TriForce, whose models do not
    share heads, and which chooses once, at a prompt of whole chunks.

    Raises:
        InvalidParameter: a number is too small; the budget must hold two chunks.
    """

    budget: int = 512
    size: int = 8
    room: int = ROOM
    queries = 1

    def __post_init__(self) -> None:
        _check(size=(self.size, 1), room=(self.room, 1))
        _check(budget=(self.budget, 2 * self.size))

    def slots(self, known: int, keys: Float[Tensor, "k m e"], queries: Float[Tensor, "k g q e"]) -> Int[Tensor, "k s"]:
        """Return the slots of each head of keys."""
        chunks, rest = divmod(known, self.size)
        count = (self.budget - rest) // self.size
        means = keys[:, : chunks * self.size].unflatten(1, (chunks, self.size)).mean(2)
        scores = (queries[:, :, -1:].sum(1) @ means.transpose(1, 2)).squeeze(1)
        scores[:, 0] = torch.inf
        best = scores.topk(count, -1).indices.sort(-1).values
        inside = torch.arange(self.size, device=keys.device)
        slots = (best.unsqueeze(-1) * self.size + inside).flatten(1)
        last = torch.arange(chunks * self.size, known, device=keys.device)
        return torch.cat([slots, last.expand(len(slots), -1)], -1)


def _looked_at(
    budget: int, known: int, keys: Float[Tensor, "k m e"], queries: Float[Tensor, "k g q e"], neighbours: int
) -> Int[Tensor, "k s"]:
    """Return the slots of the newest tokens and of the keys before them that these look at; see `Snap`."""
    window = min(WINDOW, (budget + 1) // 2)
    asking = queries[:, :, -window:]
    (heads, group, count, _), before = asking.shape, known - window
    scores = asking.flatten(1, 2) @ keys.transpose(1, 2)
    places = torch.arange(known - count, known, device=keys.device)
    hidden = torch.arange(known, device=keys.device) > places.unsqueeze(-1)
    weights = scores.unflatten(1, (group, count)).masked_fill(hidden, -torch.inf).softmax(-1)
    seen = weights[..., :before].sum(2)
    near = avg_pool1d(seen, neighbours, 1, neighbours // 2).sum(1)
    best = near.topk(budget - window, -1).indices.sort(-1).values
    return torch.cat([best, torch.arange(before, known, device=keys.device).expand(heads, -1)], -1)


def _check(**numbers: tuple[object, int]) -> None:
    for name, (value, least) in numbers.items():
        if not is_whole(value) or cast(int, value) < least:
            raise InvalidParameter(f"{name} must be a whole number of at least {least}, but is {shown(value)}.")


NUMBER = re.compile(r"[0-9]{1,7}")
WORDS: dict[str, tuple[Callable[..., Keys], str, str]] = {
    "recent": (Recent, "+", "recent:16+240"),
    "snap": (Snap, "", "snap:512"),
    "chunks": (Chunks, "/", "chunks:512/8"),
    "mass": (Mass, "", "mass:512"),
}
"""By word how keys are chosen: what makes it, what stands between its numbers, and an example."""


def word_of_keys(keys: Keys) -> str:
    """Return the word that means a choice of keys, but for its room; how it is written in Python, if there is none."""
    for name, (make, between, _) in WORDS.items():
        if type(keys) is make:
            numbers = [str(getattr(keys, one.name)) for one in fields(cast(Any, keys))[: 1 + bool(between)]]
            return f"keys={name}:{between.join(numbers)}"
    return f"keys={keys}"


def keys_of(word: str) -> Keys:
    """Return what chooses keys, by a word such as `keys=snap:512`; numbers that are left out are the usual ones.

    Raises:
        InvalidParameter: the word says something else, or a number is too small.
    """
    name, _, numbers = word.removeprefix("keys=").partition(":")
    if word.startswith("keys=") and name in WORDS and (numbers or ":" not in word):
        make, between, _ = WORDS[name]
        parts = numbers.split(between) if between else [numbers]
        if not numbers or (len(parts) <= 1 + bool(between) and all(NUMBER.fullmatch(one) for one in parts)):
            return make(*map(int, parts)) if numbers else make()
    known = ", ".join(f"keys={example}" for *_, example in WORDS.values())
    raise InvalidParameter(f"The keys {shown(word)} are not known; there are {known}.")
