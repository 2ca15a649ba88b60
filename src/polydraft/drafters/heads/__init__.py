"""Draft heads: drafters trained on the hidden states of their target."""

from polydraft.drafters.heads.autoregressive import EagleDrafter
from polydraft.drafters.heads.formats import is_head, load_head, write_block, write_eagle, write_medusa
from polydraft.drafters.heads.lattice import BlockDrafter
from polydraft.drafters.heads.medusa import MedusaDrafter

__all__ = [
    "BlockDrafter",
    "EagleDrafter",
    "MedusaDrafter",
    "is_head",
    "load_head",
    "write_block",
    "write_eagle",
    "write_medusa",
]
