"""Draft rows that are no laws: nothing is drafted below them, and the other rows of the batch go on."""

from jaxtyping import Bool, Float
from torch import Tensor


def sound_nodes(law: Float[Tensor, "b f *J K"]) -> Bool[Tensor, "b f"] | None:
    """Tell which nodes have a law; None on the host if all have.

    A drafter gives a node whose row is no law a row of zeros.
    """
    fine = law.flatten(2).amax(dim=-1) > 0
    return None if law.device.type == "cpu" and bool(fine.all()) else fine


def any_law(law: Float[Tensor, "b f *J K"], sound: Bool[Tensor, "b f"] | None) -> Float[Tensor, "b f *J K"]:
    """Return rows to draw from: any law in place of those that are none, since what is drawn there does not count."""
    if sound is None:
        return law
    return law.where(sound.view(*sound.shape, *[1] * (law.dim() - 2)), 1 / law.shape[-1])


def both(one: Bool[Tensor, "b"] | None, nodes: Bool[Tensor, "b f"] | None) -> Bool[Tensor, "b"] | None:
    """Return in which rows all of some nodes have a law, and all those before; None if that is known of all."""
    if nodes is None:
        return one
    return nodes.all(dim=-1) if one is None else one & nodes.all(dim=-1)
