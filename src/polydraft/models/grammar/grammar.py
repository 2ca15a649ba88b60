"""What a text is to be: a JSON value of a schema, a match of a regular expression, or a sentence of a grammar."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polydraft.errors import InvalidParameter, lowered, shown
from polydraft.models.grammar.library import cleaned, llguidance

WORDS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
"""The kinds of grammars, and what they are called in sentences."""
MOST_CHARACTERS = 1_000_000


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

    Raises:
        InvalidParameter: the text is none of its kind, or says what llguidance does not know.
        MissingExtra: llguidance is not installed.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in WORDS:
            raise InvalidParameter(f"kind must be one of {', '.join(WORDS)}, but is {shown(self.kind)}.")
        if not isinstance(self.text, str):
            raise InvalidParameter(f"The {self.words} must be a text, but is {shown(self.text)}.")
        if len(self.text) > MOST_CHARACTERS:
            raise InvalidParameter(f"The {self.words} has {len(self.text)} characters, but at most {MOST_CHARACTERS}.")
        if any("\ud800" <= letter <= "\udfff" for letter in self.text):
            raise InvalidParameter(f"The {self.words} has half a character (a lone surrogate), which is no text.")
        if self.kind == "json_schema":
            _parsed(self.text)
        said = llguidance().LLMatcher.validate_grammar(self.source)
        if said and not said.startswith("WARNING"):
            raise InvalidParameter(f"The {self.words} cannot be followed: {cleaned(said)}.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> "Grammar":
        """Return the grammar of all JSON values of a schema.

        Args:
            schema: a mapping, or its JSON text. What llguidance does not know of a schema is refused by name.

        Raises:
            InvalidParameter: it is no JSON, no schema, or nothing has it.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        if not isinstance(schema, Mapping | bool):
            raise InvalidParameter(f"The JSON schema must be a mapping or its JSON text, but is {shown(schema)}.")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False, default=_as_mapping))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidParameter):
                raise
            raise InvalidParameter(f"The JSON schema cannot be written as JSON: {lowered(error)}") from error

    @classmethod
    def json_object(cls) -> "Grammar":
        """Return the grammar of all JSON objects."""
        return cls("json_schema", '{"type": "object"}')

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
    def source(self) -> str:
        """The grammar as llguidance takes it."""
        return str(getattr(llguidance().LLMatcher, f"grammar_from_{self.kind}")(self.text))


def _as_mapping(value: object) -> dict[Any, Any]:
    """Return a mapping that is no dict as one.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a value of type {type(value).__name__}")


def _parsed(text: str) -> None:
    """Check that a schema is JSON, and an object or a boolean.

    Raises:
        InvalidParameter: it is something else.
    """
    try:
        schema: object = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"The JSON schema is no JSON: {lowered(error)}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"The JSON schema must be an object or a boolean, but is {shown(schema)}.")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
