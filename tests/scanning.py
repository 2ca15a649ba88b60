"""Occurrences of a text's last tokens by reading all of a text, which an index and an order must find as well."""

import numpy as np
from numpy.typing import NDArray

from polydraft.drafters.text.index import Scanned, Tokens
from polydraft.machine_code import compiled


def scanned(tokens: Tokens, stop: int, context: Tokens, longest: int) -> Scanned:
    """Find a context's last tokens in the first `stop` tokens of a text that is not indexed."""
    ends, lengths, counts = scan(tokens, stop, context, min(longest, len(context)))
    return Scanned(tokens, ends, lengths, counts.tolist())


@compiled
def scan(
    tokens: Tokens, stop: int, context: Tokens, longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the context's last token, how many tokens agree there, and the counts by that number."""
    counts, size = np.zeros(longest + 1, np.int64), len(context)
    last, found = context[size - 1], 0
    for end in range(stop):
        found += tokens[end] == last
    ends, lengths = np.empty(found, np.int64), np.empty(found, np.int64)
    at = found
    for end in range(stop):
        if tokens[end] == last:
            length = 1
            while length < longest and length <= end and tokens[end - length] == context[size - 1 - length]:
                length += 1
            at -= 1
            ends[at], lengths[at] = end, length
            counts[length] += 1
    for length in range(longest - 1, 0, -1):
        counts[length] += counts[length + 1]
    counts[0], agree = stop, 0
    while agree < longest and counts[agree + 1]:
        agree += 1
    return ends, lengths, counts[: agree + 1]
