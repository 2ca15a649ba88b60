"""Whose tokens a store holds: stores of one tokenizer mean nothing to another."""

from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from polydraft.drafters.contract import Session
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.models import tokenizer_of

MOST_PADDING = 1024
"""Models may have so many output rows more than their tokenizers have tokens."""


@dataclass(frozen=True)
class StoreVocabulary:
    """A tokenizer, as far as a store must know it.

    Args:
        size: its number of tokens, or the model's; 0 where nothing is known.
        mark: a fingerprint of its tokens; empty where the tokenizer is not known.
        name: what it is called in errors.

    Raises:
        InvalidParameter: `size` is no number of tokens.
    """

    size: int
    mark: bytes = b""
    name: str = ""

    def __post_init__(self) -> None:
        if not is_whole(self.size) or self.size < 0:
            raise InvalidParameter(
                f"The size of a vocabulary must be a whole number of at least 0, but is {shown(self.size)}."
            )

    @classmethod
    def of(cls, tokenizer: Any, name: str = "") -> "StoreVocabulary":
        """Return the vocabulary of a Hugging Face tokenizer."""
        tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        text = "\n".join(f"{index} {token}" for index, token in tokens)
        mark = sha256(text.encode(errors="surrogatepass")).digest()
        return cls(len(tokens), mark, name or str(getattr(tokenizer, "name_or_path", "") or ""))

    @classmethod
    def of_target(cls, session: Session) -> "StoreVocabulary":
        """Return the vocabulary of a session's target: its tokenizer's where that is on this machine, else its size."""
        return cls.of_model(network_of(session.target), session.vocab_size)

    @classmethod
    def of_model(cls, model: nn.Module | None, vocab_size: int) -> "StoreVocabulary":
        """Return the vocabulary of a network with so many tokens: its tokenizer's where that is on this machine."""
        found = None if model is None else _of_module(model)
        return found or cls(vocab_size)

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{self.name or 'a tokenizer without a name'} ({self.size} tokens)"

    def agrees(self, other: "StoreVocabulary") -> bool:
        """Tell whether two vocabularies may be one: by their fingerprints if both are known, else by their sizes."""
        if self.mark and other.mark:
            return self.mark == other.mark
        return not (self.size and other.size) or abs(self.size - other.size) <= MOST_PADDING

    def with_known(self, other: "StoreVocabulary") -> "StoreVocabulary":
        """Return the one of two that agree of which more is known."""
        return other if (other.mark and not self.mark) or not self.size else self


def network_of(model: Any) -> nn.Module | None:
    """Return the network inside a reader, a clock or a model of ours; None if there is none."""
    while model is not None and not isinstance(model, nn.Module):
        model = getattr(model, "model", None)
    return model


_KNOWN: WeakKeyDictionary[nn.Module, StoreVocabulary | None] = WeakKeyDictionary()
"""The vocabularies of models that were asked for: to read a tokenizer takes a moment."""


def _of_module(module: nn.Module) -> StoreVocabulary | None:
    if module not in _KNOWN:
        tokenizer = tokenizer_of(module)
        name = str(getattr(module, "name_or_path", "") or "")
        _KNOWN[module] = None if tokenizer is None else StoreVocabulary.of(tokenizer, name)
    return _KNOWN[module]
