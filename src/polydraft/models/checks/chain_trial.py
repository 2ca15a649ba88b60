"""A trial of chains: whether a model that goes on from what it remembers scores a text as it does in one pass."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models.language_model import Cache, LanguageModel
from polydraft.probs import Noise


def as_chains(door: LanguageModel, paths: Int[Tensor, "2 4"]) -> Float[Tensor, "2 4 V"]:
    """Return the logits of two texts that are read in pieces, as chains are: 1, 2 and 1 tokens of the first, 2 and 2.

    Four passes: a token of both; the second's next, from which the first's state goes back; two of both, in slots that
    are not the same; the first's last. So several tokens and single ones go on from a state and are dropped, from
    nothing and from zeros, in rows that are equally far and in others.
    """
    first = paths[:, :1]
    cache = door.new_cache(2, 8)
    scored, ones = _pass(door, cache, first, [0, 0])
    again, twos = _pass(door, cache, paths[:, 1:2], [1, 1])
    states = None if ones is None else ones.taken(twos, [1])
    cache.begin(states)
    both, threes = _pass(door, cache, torch.stack([paths[0, 1:3], paths[1, 2:4]]), [1, 2])
    cache.begin(threes)
    last, _ = _pass(door, cache, torch.stack([paths[0, 3:4], paths[1, 3:4]]), [3, 4])
    one = torch.cat([scored[0], both[0], last[0]])
    other = torch.cat([scored[1], again[1], both[1]])
    if ones is not None:
        cache.begin(ones.nothing(2))
        other = torch.cat([_pass(door, cache, paths[:, :2], [0, 0])[0][1], other[2:]])
    return torch.stack([one, other])


def one_by_one(door: LanguageModel, paths: Int[Tensor, "2 n"]) -> Float[Tensor, "2 n V"]:
    """Return the logits of two texts that are read token by token."""
    cache = door.new_cache(2, 8)
    tokens = enumerate(paths.split(1, dim=1))
    return torch.cat([_pass(door, cache, token, [place, place])[0] for place, token in tokens], dim=1)


def _pass(
    door: LanguageModel, cache: Cache, tokens: Int[Tensor, "2 w"], starts: list[int]
) -> tuple[Float[Tensor, "2 w V"], Any]:
    """Score tokens behind slots, and return the states that are left."""
    begin = torch.tensor(starts, device=tokens.device)
    places = begin.unsqueeze(-1) + torch.arange(tokens.shape[1], device=tokens.device)
    slots = torch.arange(max(starts) + tokens.shape[1], device=tokens.device)
    mask = slots <= places.unsqueeze(-1)
    logits = door.forward(tokens, places, mask, cache, begin).logits
    return logits.float(), cache.states()


def once_and_singly(
    door: LanguageModel, paths: Int[Tensor, "2 4"]
) -> Iterator[tuple[Float[Tensor, "2 2 V"], Float[Tensor, "2 2 V"]]]:
    """Yield the logits of two tokens read at once and one by one, from the same states; nothing without states.

    For each kind of states these are large noise, so that a model shows at any precision whether it heeds them: some
    read single tokens from their states, and several from nothing.
    """
    cache = door.new_cache(2, 8)
    _, real = _pass(door, cache, paths[:, :2], [0, 0])
    if real is None:
        return
    for kind in real.kinds:
        noise: Any = real.noisy(kind, Noise.from_seed(0, 1).generators[0])
        cache.begin(noise)
        once, _ = _pass(door, cache, paths[:, 2:], [2, 2])
        cache.begin(noise)
        singly = [_pass(door, cache, paths[:, place : place + 1], [place, place])[0] for place in (2, 3)]
        yield once, torch.cat(singly, dim=1)
