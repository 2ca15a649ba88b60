"""The door to the host: nodes of a batch as arrays, one at a time, for rules whose loops are machine code."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.verifiers.selection.ordered import Numbers, Places, integers, numbers, tensor

AtNode = Callable[[Numbers, Numbers, int, Places | None], tuple[Numbers, Numbers]]
"""Returns the shares of a node's drafts and the marginal of all atoms, given its draft row or rows, its target mass,
the number of its drafts and, if shares are wanted, the drafts: k atoms, -1 for absent ones."""


def node_by_node(
    at_node: AtNode,
    draft_probs: Float[Tensor, "*rows A"],
    target_mass: Float[Tensor, "*b A"],
    counts: Int[Tensor, "*b"],
    drafts: Int[Tensor, "*b k"] | None = None,
) -> tuple[Float[Tensor, "*b k"], Float[Tensor, "*b A"]]:
    """Return shares and marginals of many nodes, like the target mass in type and device; zeros without drafts.

    Nodes that are alike, of which an enumeration of trees has many, are computed once.
    """
    masses = numbers(target_mass.reshape(-1, target_mass.shape[-1]))
    rows = numbers(draft_probs).reshape(len(masses), *draft_probs.shape[target_mass.dim() - 1 :])
    number, places = (
        integers(counts.flatten()),
        None if drafts is None else integers(drafts.reshape(-1, drafts.shape[-1])),
    )
    shares, marginal = np.zeros((len(masses), 0 if places is None else places.shape[1])), np.zeros(masses.shape)
    known = dict[tuple[bytes, ...], tuple[Numbers, Numbers]]()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        for i in np.flatnonzero(number > 0).tolist():
            own = None if places is None else places[i]
            key = (rows[i].tobytes(), masses[i].tobytes(), number[i].tobytes(), b"" if own is None else own.tobytes())
            if key not in known:
                known[key] = at_node(rows[i], masses[i], int(number[i]), own)
            shares[i], marginal[i] = known[key]
    return (
        tensor(shares).to(target_mass).view(*target_mass.shape[:-1], shares.shape[1]),
        tensor(marginal).to(target_mass).view(target_mass.shape),
    )
