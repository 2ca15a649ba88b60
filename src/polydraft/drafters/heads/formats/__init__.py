"""Folders of published heads, read and written."""

from polydraft.drafters.heads.formats.block_folders import write_block
from polydraft.drafters.heads.formats.kinds import is_head, load_head

__all__ = ["is_head", "load_head", "write_block"]
