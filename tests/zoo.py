"""Pairs of (target, draft) rows that break things, in float64, and Hypothesis strategies that draw more of them."""

import torch
from hypothesis import strategies as st
from torch import Tensor


def row(*mass: float) -> Tensor:
    """Return these entries as they are: the sum in float64 is one."""
    return torch.tensor(mass, dtype=torch.float64)


ZOO: dict[str, tuple[Tensor, Tensor]] = {
    "equal": (row(0.2, 0.5, 0.3), row(0.2, 0.5, 0.3)),
    "disjoint supports": (row(0.5, 0.5, 0, 0), row(0, 0, 0.3, 0.7)),
    "one-hot, the same": (row(0, 1, 0), row(0, 1, 0)),
    "one-hot, another": (row(0, 1, 0), row(0, 0, 1)),
    "one-hot target": (row(0, 1, 0, 0), row(0.1, 0.2, 0.3, 0.4)),
    "one-hot draft": (row(0.4, 0.3, 0.2, 0.1), row(0, 0, 1, 0)),
    "ties": (row(0.25, 0.25, 0.25, 0.25), row(0.3, 0.3, 0.2, 0.2)),
    "tied draft": (row(0.1, 0.6, 0.2, 0.1), row(0.25, 0.25, 0.25, 0.25)),
    "zeros": (row(0.5, 0, 0.5, 0), row(0, 0.4, 0.6, 0)),
    "near-equal": (row(0.2, 0.5, 0.3), row(0.2 + 1e-13, 0.5 - 2e-13, 0.3 + 1e-13)),
    "long tail": (row(0.9, 0.09, 0.009, 0.0009, 0.0001), row(0.0001, 0.0009, 0.009, 0.09, 0.9)),
    "1e-30 in the draft": (row(0.5, 0.25, 0.25), row(1, 1e-30, 3e-30)),
    "1e-30 in the target": (row(1, 1e-30, 3e-30), row(0.5, 0.25, 0.25)),
    "1e-30 in both": (row(1e-30, 1, 0), row(1, 1e-30, 2e-30)),
    "subnormal": (row(0.5, 0.25, 0.25), row(1, 1e-310, 3e-310)),
    "duplicates bite": (row(0.05, 0.25, 0.4, 0.3), row(0.6, 0.2, 0.1, 0.1)),
}

_WEIGHTS = st.sampled_from([0.0, 0.0, 1e-30, 1e-9, 0.5, 1.0, 1.0, 2.0, 7.0]) | st.floats(0.001, 1)


def rows(size: int) -> st.SearchStrategy[Tensor]:
    """Draw one distribution with zeros, ties, tiny masses and one-hot rows among them."""
    weights = st.lists(_WEIGHTS, min_size=size, max_size=size).filter(any)
    return weights.map(lambda mass: torch.tensor(mass, dtype=torch.float64) / sum(mass))


def pairs(least: int = 2, most: int = 4) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Draw a target row and a draft row over the same atoms."""
    return st.integers(least, most).flatmap(lambda size: st.tuples(rows(size), rows(size)))
