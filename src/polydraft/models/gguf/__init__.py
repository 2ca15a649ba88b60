"""GGUF files: what is in one, whether it is whole, and how transformers is asked to read it."""

from polydraft.models.gguf.readable import alone, check_gguf, unpacked

__all__ = ["alone", "check_gguf", "unpacked"]
