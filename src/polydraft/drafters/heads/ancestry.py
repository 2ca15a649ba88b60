"""What a head keeps for every node of a growing tree, and where the node above finds its own."""

from jaxtyping import Float, Int
from torch import Tensor, arange, cat, nn

from polydraft.trees import Frontier


def parents_of(frontier: Frontier) -> Int[Tensor, "b f 1"]:
    """Return the number of each node's parent; 0 for the root, which has none."""
    earlier = frontier.ancestors[..., : frontier.nodes.start]
    order = arange(1, earlier.shape[-1] + 1, device=earlier.device)
    last = (earlier * order).amax(-1) - 1 if earlier.shape[-1] else earlier.sum(-1)
    return last.clamp_min(0).unsqueeze(-1)


def with_nodes(
    known: Float[Tensor, "b n d"], frontier: Frontier, values: Float[Tensor, "b f d"]
) -> Float[Tensor, "b m d"]:
    """Return what is known of all nodes, by their numbers: zeros for leaves, which are never proposed for."""
    before = known[:, : frontier.nodes.start]
    missing = frontier.nodes.start - before.shape[1]
    return cat([nn.functional.pad(before, (0, 0, 0, missing)), values], dim=1)
