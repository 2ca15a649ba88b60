"""What a text is to be, by JSON schema, regular expression or rules; and a tokenizer as llguidance sees it."""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakSet

from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from polydraft.errors import InvalidParameter, VocabularyMismatch, lowered, shown
from polydraft.extras import GRAMMAR
from polydraft.models.checkpoints.silence import first_sentence
from polydraft.models.loading import MOST_PADDING, differing_tokens, tokenizer_of

REASON = re.compile(r"^\s*error: (.*)$", re.MULTILINE)
LONGEST = 200
"""How many characters of what llguidance says are passed on: it lists whole grammars and vocabularies."""
WORDS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
"""The kinds of grammars, and what they are called in sentences."""
MOST_CHARACTERS = 1_000_000
OPTIONS = "x-guidance"
"""Where a schema holds options of llguidance's."""
COMPACT: dict[str, Any] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
}
"""The options for JSON without blanks."""


def llguidance() -> Any:
    """Return the package.

    Raises:
        MissingExtra: it cannot be used.
    """
    GRAMMAR.check()
    return import_module("llguidance")


def cleaned(said: str) -> str:
    """Return what llguidance says as the end of a sentence: its reason alone, in a line, no control characters."""
    text = said.split("<state>")[0]
    reasons = REASON.findall(text)
    lines = reasons or [line for line in text.splitlines() if line.strip()] or ["no reason is given"]
    line = "".join(letter if letter.isprintable() else " " for letter in lines[0])
    line = " ".join(line.split()).rstrip(". ")
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rstrip()} ..."


def is_dead_end(matcher: Any) -> bool:
    """Tell whether a matcher has failed because no token goes on from where it is, and not by a limit."""
    return str(matcher.get_error()).startswith("NoExtension")


@dataclass(frozen=True)
class Grammar:
    """What every text of a call must be, for `grammar=` of `generate`, `stream` and `generate_many`.

    Let p be the law of the next token after processors and before temperature and filters, y the new tokens so far,
    and L the set of texts that the grammar allows. The text then follows

        q(x | y) = p(x | y) 1[y x is the beginning of a text in L] / Z(y),

    with an end-of-text id in x's place allowed exactly where y is itself in L. This is the law of masked decoding token
    by token, at every node of a tree by the node's own y. It is not p given that the whole text is in L.

    Source: llguidance (github.com/guidance-ai/llguidance), which also decides which keywords of JSON schemas it knows.

    Args:
        kind: "json_schema", "regex" or "lark".
        text: the schema as JSON, the pattern, or the rules.
        compact: of a schema, whether its values are written without blanks between their parts.

    Raises:
        InvalidParameter: the text is none of its kind, says what llguidance does not know, or says of blanks something
            else than `compact`.
        MissingExtra: llguidance is not installed.
    """

    kind: str
    text: str
    compact: bool = False

    def __post_init__(self) -> None:
        if self.kind not in WORDS:
            raise InvalidParameter(f"kind must be one of {', '.join(WORDS)}, but is {shown(self.kind)}.")
        if not isinstance(self.text, str):
            raise InvalidParameter(f"The {self.words} must be a text, but is {shown(self.text)}.")
        if len(self.text) > MOST_CHARACTERS:
            raise InvalidParameter(f"The {self.words} has {len(self.text)} characters, but at most {MOST_CHARACTERS}.")
        if any("\ud800" <= letter <= "\udfff" for letter in self.text):
            raise InvalidParameter(f"The {self.words} has half a character (a lone surrogate), which is no text.")
        if not isinstance(self.compact, bool):
            raise InvalidParameter(f"compact must be True or False, but is {shown(self.compact)}.")
        if self.compact and self.kind != "json_schema":
            raise InvalidParameter(f"compact is for JSON, whose blanks it leaves out, and not for a {self.words}.")
        schema = _parsed(self.text) if self.kind == "json_schema" else {}
        said = llguidance().LLMatcher.validate_grammar(self._made(self.text))
        if said and not said.startswith("WARNING"):
            raise InvalidParameter(f"The {self.words} cannot be followed: {cleaned(said)}.")
        own = schema.get(OPTIONS, {}) if self.compact and isinstance(schema, dict) else {}
        other = [name for name, value in COMPACT.items() if own.get(name, value) != value]
        if other:
            raise InvalidParameter(f"compact and the schema's own {OPTIONS}.{other[0]} both say what blanks there are.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool, *, compact: bool = False) -> "Grammar":
        """Return the grammar of all JSON values of a schema.

        Args:
            schema: a mapping, or its JSON text. What llguidance does not know of a schema is refused by name.
            compact: whether there are no blanks between the parts of a value. JSON allows any, which small models may
                write without end.

        Raises:
            InvalidParameter: it is no JSON, no schema, or nothing has it.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema, compact)
        if not isinstance(schema, Mapping | bool):
            raise InvalidParameter(f"The JSON schema must be a mapping or its JSON text, but is {shown(schema)}.")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False, default=_as_mapping), compact)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidParameter):
                raise
            raise InvalidParameter(f"The JSON schema cannot be written as JSON: {lowered(error)}") from error

    @classmethod
    def json_object(cls, *, compact: bool = False) -> "Grammar":
        """Return the grammar of all JSON objects; `compact` ones have no blanks between their parts."""
        return cls("json_schema", '{"type": "object"}', compact)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of all texts that match a regular expression as a whole.

        Raises:
            InvalidParameter: it is none, or has look-around or back-references, which no such grammar has.
        """
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Return a grammar of rules in Lark's words; `start` is the rule that the whole text follows.

        Raises:
            InvalidParameter: it is none; where, and why.
        """
        return cls("lark", text)

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return WORDS[self.kind]

    @property
    def told(self) -> dict[str, Any]:
        """What is told of it among the settings of a call."""
        return {self.kind: self.text, **({"compact": True} if self.compact else {})}

    @property
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        if not self.compact:
            return self._made(self.text)
        return self._made("{}" if _parsed(self.text) is True else self.text, overrides=COMPACT)

    def _made(self, text: str, **options: Any) -> str:
        return str(getattr(llguidance().LLMatcher, f"grammar_from_{self.kind}")(text, **options))


def _as_mapping(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a value of type {type(value).__name__}")


def _parsed(text: str) -> dict[str, Any] | bool:
    """Return a schema from its JSON, which is an object or a boolean."""
    try:
        schema: object = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"The JSON schema is no JSON: {lowered(error)}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"The JSON schema must be an object or a boolean, but is {shown(schema)}.")
    return schema


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


END = "<|end of a grammar|>"
"""A token that no model has, by which llguidance ends a text; a model's own ends are seen to here."""
MOST_SHARE = 1.25
"""How many ids more than the tokenizer, beside `MOST_PADDING`, a model may have, which pads its output for speed."""
MOST_KEPT = 64
"""How many compiled grammars are kept for a tokenizer."""


class Compilable(Protocol):
    """What can be compiled: a grammar, or one with something before it."""

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        ...

    @property
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer as llguidance sees it.

    Args:
        tokens: llguidance's tokenizer.
        end: the id of its end.
        compiled: the grammars that were compiled lately.
        spelt: how tokens are spelt, by the special tokens that are seen.
    """

    tokens: Any
    end: int
    compiled: OrderedDict["Compilable", Any] = field(default_factory=OrderedDict["Compilable", Any])
    spelt: dict[frozenset[str], tuple[str, ...]] = field(default_factory=dict[frozenset[str], tuple[str, ...]])

    def spellings(self, seen: frozenset[str]) -> tuple[str, ...]:
        """Return the bytes of every token as a text of as many letters.

        Args:
            seen: the special tokens that have a text; the others have none, as in a text without special tokens.
        """
        if seen not in self.spelt:
            told = {name.encode() for name in seen}
            found = [self.tokens.decode_bytes([token]) for token in range(self.end)]
            special = map(self.tokens.is_special_token, range(self.end))
            bare = [b"" if one and text not in told else text for text, one in zip(found, special, strict=True)]
            rest = self.tokens.vocab_size - self.end  # the end itself, and ids that stand for nothing
            self.spelt[seen] = (*(text.decode("latin-1") for text in bare), *[""] * rest)
        return self.spelt[seen]

    def start(self, grammar: "Compilable") -> Any:
        """Return a matcher at the beginning of a text, which is to be copied.

        Raises:
            InvalidParameter: the grammar is too large, or allows no text of this tokenizer's.
        """
        if grammar not in self.compiled:
            self.compiled[grammar] = self._compiled(grammar)
        while len(self.compiled) > MOST_KEPT:
            self.compiled.popitem(last=False)
        return self.compiled[grammar]

    def _compiled(self, grammar: "Compilable") -> Any:
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
    size = len(given)
    if not size - MOST_PADDING <= vocab_size <= MOST_SHARE * size + MOST_PADDING:
        raise VocabularyMismatch(f"The tokenizer has {size} tokens and the model {vocab_size}: it is another model's.")
    if getattr(given, "name_or_path", "") == getattr(model, "name_or_path", None):
        return
    own = _own(model)
    if own is None:
        return
    for index, token, other in differing_tokens(given, own):
        raise VocabularyMismatch(
            f"The tokenizer is another model's: id {index} is {token!r}, but the model's own has {other!r}."
        )
