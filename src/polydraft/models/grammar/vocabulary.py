"""A tokenizer as llguidance sees it, and the grammars that were compiled for it: both are dear, and kept."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from polydraft.errors import InvalidParameter, VocabularyMismatch, shown
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.grammar.grammar import Grammar, cleaned, is_dead_end, llguidance
from polydraft.models.loading import tokenizer_of

END = "<|end of a grammar|>"
"""A token that no model has, by which llguidance ends a text; a model's own ends are seen to here."""
MOST_PADDING, MOST_SHARE = 1024, 1.25
"""How many ids more or less than the tokenizer a model may have, which pads its output for speed."""
MOST_KEPT = 64
"""How many compiled grammars are kept for a tokenizer."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer as llguidance sees it.

    Args:
        tokens: llguidance's tokenizer.
        end: the id of its end.
        compiled: the grammars that were compiled lately.
    """

    tokens: Any
    end: int
    compiled: OrderedDict[Grammar, Any] = field(default_factory=OrderedDict)

    def start(self, grammar: Grammar) -> Any:
        """Return a matcher at the beginning of a text, which is to be copied.

        Raises:
            InvalidParameter: the grammar is too large, or allows no text of this tokenizer's.
        """
        if grammar not in self.compiled:
            self.compiled[grammar] = self._compiled(grammar)
        while len(self.compiled) > MOST_KEPT:
            self.compiled.popitem(last=False)
        return self.compiled[grammar]

    def _compiled(self, grammar: Grammar) -> Any:
        made = llguidance().LLMatcher(self.tokens, grammar.source, log_level=0)
        if made.is_error():
            raise InvalidParameter(f"The {grammar.words} cannot be followed: {cleaned(made.get_error())}.")
        tried = made.deep_copy()
        ends, mask = tried.is_accepting(), tried.compute_bitmask()
        if tried.is_error() and not is_dead_end(tried):
            raise InvalidParameter(f"The {grammar.words} cannot be followed: {cleaned(tried.get_error())}.")
        if not ends and (tried.is_error() or not any(mask)):
            raise InvalidParameter(f"The {grammar.words} allows no text at all of the tokenizer's tokens.")
        return made


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, int], Vocabulary]] = WeakKeyDictionary()
_OWN: WeakKeyDictionary[nn.Module, PreTrainedTokenizerBase] = WeakKeyDictionary()
_FITTING: WeakKeyDictionary[nn.Module, WeakSet[PreTrainedTokenizerBase]] = WeakKeyDictionary()


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    """Return a tokenizer as llguidance sees it, for a model with so many ids; made once.

    Raises:
        InvalidParameter: llguidance cannot read such a tokenizer.
    """
    known = _KNOWN.setdefault(tokenizer, {})
    key = len(tokenizer), vocab_size
    if key not in known:
        known[key] = _made(tokenizer, vocab_size)
    return known[key]


def _made(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidParameter(
            f"A grammar needs a fast tokenizer, whose spelling is in a tokenizer.json, but the tokenizer is of type "
            f"{type(tokenizer).__name__}."
        )
    library = llguidance()
    try:
        own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        own.no_padding()
        own.no_truncation()
        before = max(own.get_vocab(with_added_tokens=True).values())
        own.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        end = int(cast(int, own.token_to_id(END)))
        if end <= before:  # ids with gaps, of which the new one has hit a taken one
            raise ValueError("its ids have gaps")
        return Vocabulary(library.LLTokenizer(own.to_str(), n_vocab=max(vocab_size, end + 1), eos_token=end), end)
    except Exception as error:
        raise InvalidParameter(f"llguidance cannot read the tokenizer: {first_sentence(error)}.") from error


def fitting_tokenizer(given: object, model: nn.Module, vocab_size: int) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a call: the one that is given, else the model's own, where it is found on this machine.

    Raises:
        InvalidParameter: there is none, or what is given is none.
        VocabularyMismatch: it is another model's.
    """
    if given is None:
        own = _own(model)
        if own is None:
            raise InvalidParameter("grammar needs the tokenizer argument, to know how tokens are spelt.")
        return own
    if not isinstance(given, PreTrainedTokenizerBase):
        raise InvalidParameter(f"tokenizer must be a tokenizer of Hugging Face's, but is {shown(given)}.")
    fitting = _FITTING.setdefault(model, WeakSet())
    if given not in fitting:
        _check_fit(given, model, vocab_size)
        fitting.add(given)
    return given


def _own(model: nn.Module) -> PreTrainedTokenizerBase | None:
    if model not in _OWN:
        found = tokenizer_of(model)
        if found is None:
            return None
        _OWN[model] = found
    return _OWN[model]


def _check_fit(given: PreTrainedTokenizerBase, model: nn.Module, vocab_size: int) -> None:
    """Check that a tokenizer can be the model's.

    Raises:
        VocabularyMismatch: it has many more or fewer tokens than the model, or others than the model's own tokenizer.
    """
    size = len(given)
    if not size - MOST_PADDING <= vocab_size <= MOST_SHARE * size + MOST_PADDING:
        raise VocabularyMismatch(f"The tokenizer has {size} tokens and the model {vocab_size}: it is another model's.")
    if getattr(given, "name_or_path", "") == getattr(model, "name_or_path", None):
        return
    own = _own(model)
    if own is None:
        return
    theirs = {index: token for token, index in own.get_vocab().items()}
    for token, index in sorted(given.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(index, token) != token:
            raise VocabularyMismatch(
                f"The tokenizer is another model's: id {index} is {token!r}, but the model's own has {theirs[index]!r}."
            )
