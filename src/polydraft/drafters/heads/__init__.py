"""Draft heads: drafters trained on the hidden states of their target."""

from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.formats import is_head, load_head, write_block, write_eagle, write_medusa

__all__ = [
    "HeadDrafter",
    "is_head",
    "load_head",
    "write_block",
    "write_eagle",
    "write_medusa",
]
