"""Folders of published heads, read and written."""

from polydraft.drafters.heads.formats.adapter_folders import write_adapter
from polydraft.drafters.heads.formats.blocks.block_writing import write_block
from polydraft.drafters.heads.formats.eagle_folders import write_eagle
from polydraft.drafters.heads.formats.falcon_folders import write_falcon
from polydraft.drafters.heads.formats.head_kinds import has_head_inside, is_head, load_adapter, load_head
from polydraft.drafters.heads.formats.last_state_folders import write_medusa
from polydraft.drafters.heads.formats.mtp_folders import has_modules, load_modules, write_mtp
from polydraft.drafters.heads.formats.own_walk_folders import write_walk
from polydraft.drafters.heads.formats.rider_folders import own_riders, write_pass
from polydraft.drafters.heads.formats.walk_folders import write_hydra, write_mlp, write_redrafter

__all__ = [
    "has_head_inside",
    "has_modules",
    "is_head",
    "load_adapter",
    "load_head",
    "load_modules",
    "own_riders",
    "write_adapter",
    "write_block",
    "write_eagle",
    "write_falcon",
    "write_hydra",
    "write_medusa",
    "write_mlp",
    "write_mtp",
    "write_pass",
    "write_redrafter",
    "write_walk",
]
