"""Folders of published heads, read and written."""

from polydraft.drafters.heads.formats.block_writing import write_block
from polydraft.drafters.heads.formats.eagle_folders import write_eagle
from polydraft.drafters.heads.formats.falcon_folders import write_falcon
from polydraft.drafters.heads.formats.head_kinds import has_head_inside, is_head, load_head
from polydraft.drafters.heads.formats.last_state_folders import write_medusa
from polydraft.drafters.heads.formats.walk_folders import write_hydra, write_mlp, write_redrafter

__all__ = [
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
