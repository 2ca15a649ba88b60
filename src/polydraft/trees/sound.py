"""Draft rows that are no laws, where this is not waited for: nothing is drafted below them."""

from jaxtyping import Bool, Float
from torch import Tensor


def sound_nodes(law: Float[Tensor, "b f *J K"]) -> Bool[Tensor, "b f"] | None:
    """Tell which nodes have a law; None on the host, where a drafter raises an error instead.

    On a device a drafter gives a node whose row is no law a row of zeros.
    """
    return None if law.device.type == "cpu" else law.flatten(2).amax(dim=-1) > 0


def any_law(law: Float[Tensor, "b f *J K"], sound: Bool[Tensor, "b f"] | None) -> Float[Tensor, "b f *J K"]:
    """Return rows to draw from: any law in place of those that are none, since what is drawn there does not count."""
    if sound is None:
        return law
    return law.where(sound.view(*sound.shape, *[1] * (law.dim() - 2)), 1 / law.shape[-1])


def both(one: Bool[Tensor, ""] | None, nodes: Bool[Tensor, "b f"] | None) -> Bool[Tensor, ""] | None:
    """Return whether all of some nodes have a law, and all those before; None on the host."""
    if nodes is None:
        return one
    return nodes.all() if one is None else one & nodes.all()
