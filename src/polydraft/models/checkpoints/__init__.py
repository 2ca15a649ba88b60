"""Model folders: where a name leads, what a folder must hold, and why it is refused."""

from polydraft.models.checkpoints.contents import check_tokenizer_files, check_weights, read_config
from polydraft.models.checkpoints.places import Source, find, is_gguf, is_known
from polydraft.models.checkpoints.reasons import reason
from polydraft.models.checkpoints.silence import held_back

__all__ = [
    "Source",
    "check_tokenizer_files",
    "check_weights",
    "find",
    "held_back",
    "is_gguf",
    "is_known",
    "read_config",
    "reason",
]
