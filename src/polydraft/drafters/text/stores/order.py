"""The order of a segment's places: by the text before and at each, read backwards, as far as `LONGEST` tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.index import LONGEST, Tokens, as_tokens
from polydraft.machine_code import compiled


def backward_order(tokens: Tokens) -> NDArray[np.uint32]:
    """Return the places of tokens, ordered by their last token, then by the one before it, and so on.

    The order holds for `LONGEST` tokens and no further than a sentinel. Ranks by the last k tokens make those by 2 k;
    only places that are not yet told apart are sorted again. Twice 64 bits per token are needed meanwhile.

    Source: prefix doubling, Manber and Myers 1990; the refinement of Larsson and Sadakane 2007.
    """
    before = np.concatenate([np.zeros(1, np.uint64), tokens[:-1].astype(np.uint64)])[: len(tokens)]
    keys = (tokens.astype(np.uint64) << np.uint64(32)) | before
    del before
    order = np.argsort(keys).astype(np.uint32)
    slots = np.arange(len(tokens), dtype=np.uint32)
    ranks = np.zeros(len(tokens), np.uint32)
    known = 2
    slots = _ranked(order, slots, keys[order], ranks)
    del keys
    while known < LONGEST and len(slots):
        places = order[slots]
        keys = ranks[places].astype(np.uint64) << np.uint64(32)
        keys |= np.where(places >= known, ranks[np.maximum(places, known) - known] + np.uint32(1), np.uint32(0))
        again = np.argsort(keys)
        order[slots] = places[again]
        slots = _ranked(order, slots, keys[again], ranks)
        known *= 2
    return order


def joined_orders(tokens: Tokens, orders: Sequence[Tokens]) -> Tokens:
    """Return the order of tokens of which the orders of parts are known, in a tenth of the time of a new one.

    Args:
        tokens: all parts behind one another.
        orders: the places of each part, ordered.
    """
    left = list(orders)
    while len(left) > 1:
        pairs = [left[at : at + 2] for at in range(0, len(left), 2)]
        left = [as_tokens(merge(tokens, *pair, LONGEST)) if len(pair) > 1 else pair[0] for pair in pairs]
    return left[0]


@compiled
def merge(tokens: Tokens, first: Tokens, second: Tokens, longest: int) -> Tokens:
    """Merge two orders of places of the same tokens. Damaged ones point anywhere, and give an order of some kind."""
    whole, one, other = np.empty(len(first) + len(second), np.uint32), 0, 0
    for at in range(len(whole)):
        goes_first = one < len(first)
        if goes_first and other < len(second):
            here, there = np.int64(first[one]), np.int64(second[other])
            for back in range(longest):
                if back > here or back > there or here >= len(tokens) or there >= len(tokens):
                    break
                token, rival = tokens[here - back], tokens[there - back]
                if token != rival:
                    goes_first = token < rival
                    break
                if token == 0xFFFFFFFF:
                    break
        if goes_first:
            whole[at] = first[one]
            one += 1
        else:
            whole[at] = second[other]
            other += 1
    return whole


def _ranked(
    order: NDArray[np.uint32], slots: NDArray[np.uint32], keys: NDArray[np.uint64], ranks: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Give the places in some slots the first slot of their group as rank; return the slots of groups of several."""
    first = np.ones(len(keys) + 1, np.bool_)
    first[1:-1] = keys[1:] != keys[:-1]
    starts = np.maximum.accumulate(np.where(first[:-1], np.arange(len(keys), dtype=np.uint32), np.uint32(0)))
    ranks[order[slots]] = slots[starts]
    return slots[~(first[:-1] & first[1:])]
