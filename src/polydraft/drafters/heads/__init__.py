"""Draft heads: drafters trained on the hidden states of their target."""

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds, HeadNetwork, TreePass
from polydraft.drafters.heads.formats import (
    has_head_inside,
    is_head,
    load_head,
    write_block,
    write_eagle,
    write_falcon,
    write_hydra,
    write_medusa,
    write_mlp,
    write_redrafter,
)

__all__ = [
    "HeadDrafter",
    "HeadEnds",
    "HeadNetwork",
    "TreePass",
    "has_head_inside",
    "is_head",
    "load_head",
    "write_block",
    "write_eagle",
    "write_falcon",
    "write_hydra",
    "write_medusa",
    "write_mlp",
    "write_redrafter",
]
