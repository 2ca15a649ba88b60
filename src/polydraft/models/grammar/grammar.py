"""What a text is to be: a JSON value of a schema, a match of a regular expression, or a sentence of a grammar."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from polydraft.errors import InvalidParameter, lowered, shown
from polydraft.extras import GRAMMAR

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
    """Return a mapping that is no dict as one.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a value of type {type(value).__name__}")


def _parsed(text: str) -> dict[str, Any] | bool:
    """Return a schema from its JSON, which is an object or a boolean.

    Raises:
        InvalidParameter: it is something else.
    """
    try:
        schema: object = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"The JSON schema is no JSON: {lowered(error)}") from error
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"The JSON schema must be an object or a boolean, but is {shown(schema)}.")
    return schema


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
