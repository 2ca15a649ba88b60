"""Attention masks: which key slots each node of a token tree may attend to."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def tree_mask(ancestors: Bool[Tensor, "b f n"], lengths: Int[Tensor, "b"], slots: int) -> Bool[Tensor, "b f m"]:
    """Let each node see the row's committed tokens and its own ancestors, and nothing else.

    Key slots 0 to lengths[b] - 1 hold row b's committed tokens; slot lengths[b] + j holds tree node j.

    Args:
        ancestors: which of the first n nodes each of the f scored nodes descends from, itself included.
        lengths: committed tokens per row.
        slots: the number of key slots m; at least max(lengths) + n.
    """
    batch, frontier, size = ancestors.shape
    if batch == 1:
        length = int(lengths[0])
        seen = torch.nn.functional.pad(ancestors, (length, 0), value=True)
        spare = slots - length - size
        return torch.nn.functional.pad(seen, (0, spare), value=False) if spare else seen
    node = torch.arange(slots, device=lengths.device) - lengths.unsqueeze(-1)
    inside = ((node >= 0) & (node < size)).unsqueeze(1)
    place = node.clamp(0, size - 1).unsqueeze(1).expand(batch, frontier, slots)
    return (ancestors.gather(-1, place) & inside) | (node < 0).unsqueeze(1)


def causal_mask(lengths: Int[Tensor, "b"], width: int, first: int = 0) -> Bool[Tensor, "b t m"]:
    """Let each prompt token from `first` to `width` see itself and those before; none sees slots past a row's length.

    Rows are right-padded; a padding token sees the row's tokens, and in an empty row
    the first slot, so that its attention is defined.
    """
    order = torch.arange(width, device=lengths.device)
    causal = order.unsqueeze(0) <= order[first:].unsqueeze(1)
    inside = order < lengths.clamp_min(1).unsqueeze(-1)
    return causal.unsqueeze(0) & inside.unsqueeze(1)
