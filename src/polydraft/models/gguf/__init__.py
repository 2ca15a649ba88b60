"""GGUF files: what is in one, whether it is whole, and how transformers is asked to read it."""

from polydraft.models.gguf.alone import alone
from polydraft.models.gguf.checking import check_gguf
from polydraft.models.gguf.unpacking import unpacked

__all__ = ["alone", "check_gguf", "unpacked"]
