"""Model folders: where a name leads, what a folder must hold, and why it is refused."""

from polydraft.models.checkpoints.contents import check_tokenizer_files, check_weights, read_config
from polydraft.models.checkpoints.model_places import Source, find, is_gguf, is_known
from polydraft.models.checkpoints.silence import held_back, reason

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
