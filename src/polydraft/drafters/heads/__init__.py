"""Draft heads: drafters trained on the hidden states of their target."""

from polydraft.drafters.heads.formats import is_head, load_head, write_block
from polydraft.drafters.heads.lattice import BlockDrafter

__all__ = ["BlockDrafter", "is_head", "load_head", "write_block"]
