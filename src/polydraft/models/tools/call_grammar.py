"""The grammar of calls in a format: what a text is from the mark of its first call on."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import OPTIONS, Grammar
from polydraft.models.grammar.late import literal
from polydraft.models.tools.call_formats import ToolFormat
from polydraft.models.tools.call_readers import NAME, is_plain_text
from polydraft.models.tools.python_rules import TYPES, PythonRules, check_names, check_shape, is_open, typed

BLANKS = {"whitespace_pattern": "[ \\n]?"}
"""Between the parts of arguments stands one blank at most: JSON allows any number, which small models write."""
TAGGED = frozenset("<>\n")
"""What no name of an argument has that stands inside marks."""
OF_TEXTS = frozenset(("type", "description", "title", "default", "examples", "enum", "const", "$comment"))
"""Keywords of texts that can be held to where a text is written plainly."""


@dataclass(frozen=True)
class Tool:
    """A function that may be called.

    Args:
        name: its name.
        parameters: the JSON schema of its arguments, an object.
        strict: whether calls are held to the schema where a format is followed.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


NEXT_MESSAGE = "<|start|>assistant"
"""What begins a message of harmony that is not the first."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
ANY_TEXT: Mapping[str, Any] = {"type": "string"}


class CallRules:
    """Writes the rules of calls in Lark's words.

    Args:
        own: the format.
        special: the special tokens that marks may be, with their ids: grammars name these by their ids.
    """

    def __init__(self, own: ToolFormat, special: Mapping[str, int]) -> None:
        self.own, self.special = own, special
        self.rules = list[str]()

    def literal(self, text: str) -> str:
        """Return what matches a text and nothing else."""
        return literal(text, self.special)

    def calls(self, tools: Sequence[Tool], *, parallel: bool, behind: str) -> str:
        """Return the rules of calls of these tools.

        Args:
            tools: what may be called.
            parallel: whether several calls may follow one another.
            behind: what stands before already, a beginning of the format's lead.
        """
        own = self.own
        one = [f"call_{number}" for number in range(len(tools))]
        for name, tool in zip(one, tools, strict=True):
            self.rules.append(f"{name}: {self._call(name, tool)}")
        self.rules.append(f"call: {' | '.join(one)}")
        again = f"({self.literal(own.next_lead)} call)*" if parallel and own.kind != "harmony" else ""
        lead, bracket = self.literal(own.lead.removeprefix(behind)), own.lead.removeprefix(behind).partition(" [")
        if own.begin.endswith(" ["):
            lead = f'{self.literal(bracket[0])} " "? {self.literal("[" + bracket[2])}'
        if own.kind == "harmony" and not behind:
            lead = f"({self.literal(NEXT_MESSAGE)})? {lead}"  # behind reasoning there is a message of its own
        return "\n".join([f"start: {lead} call {again} {self.literal(own.end)}", *self.rules, ""])

    def _call(self, rule: str, tool: Tool) -> str:
        own, name = self.own, tool.name
        if not NAME.fullmatch(name):
            raise InvalidParameter(f"tools has a function {shown(name)}, which no call can name.")
        if own.kind == "json":
            before = self.literal(f'{_quoted(name)[1:-1]}", "{own.key}": ')
            return f"{before} {_json(tool.parameters)} {self.literal('}' + own.call_end)}"
        if own.kind in ("header", "harmony"):
            number = ' ":" /[0-9]{1,3}/ ' if own.counted else " "
            number = f" ({self.literal(own.aside)} /[a-zA-Z0-9]{{9}}/)? " if own.aside else number
            rest = f"{self.literal(own.infix)} {_json(tool.parameters)} {self.literal(own.call_end)}"
            return f"{self.literal(name)}{number}{rest}"
        if own.kind == "tagged":
            return f"{self.literal(name + own.name_end)} {self._tagged(rule, tool)} {self.literal(own.call_end)}"
        made = PythonRules(rule, tool.parameters)
        inside = made.keywords(tool.parameters)
        self.rules += made.rules
        return f'{self.literal(name + "(")} {inside} ")"'

    def _tagged(self, rule: str, tool: Tool) -> str:
        own, schema, found = self.own, tool.parameters, list[str]()
        wanted, known = schema.get("required") or (), _properties(schema, own)
        check_names(schema)
        for key in known:
            if not key or key != key.strip() or not TAGGED.isdisjoint(key):
                raise InvalidParameter(
                    f"An argument named {shown(key)} cannot be written in calls of the format {own.name}; rename it, "
                    "or leave strict out."
                )
        if is_open(schema):
            if schema.get("additionalProperties") not in (None, True):
                raise InvalidParameter(
                    f"Arguments with additionalProperties cannot be held to it in calls of the format {own.name}; name "
                    "them one by one as properties."
                )
            key = f"{self.literal(own.key_begin)} /[^<>\\n]{{1,256}}/ {self.literal(own.key_end)}"
            self.rules.append(f"{rule}_0: {key} {self._plain(rule, 0, ANY_TEXT, schema)}")
            return f"{rule}_0*"
        for number, (key, one) in enumerate(known.items()):
            before = self.literal(own.key_begin + key + own.key_end)
            self.rules.append(f"{rule}_{number}: {before} {self._plain(rule, number, one, schema)}")
            found.append(f"{rule}_{number}{'' if key in wanted else '?'}")
        return " ".join(found)

    def _plain(self, rule: str, number: int, schema: Any, whole: Mapping[str, Any]) -> str:
        """Return what matches the value of a tagged argument and the mark behind it."""
        end = self.own.value_end
        if not is_plain_text(schema):
            inner = schema if isinstance(schema, bool) else {**_definitions(whole), **schema}
            return f"{_json(inner)} {self.literal(end)}"
        strange = sorted(schema.keys() - OF_TEXTS)
        if strange:
            raise InvalidParameter(
                f"A text with {strange[0]} cannot be held to it in calls of the format {self.own.name}, which writes "
                "texts plainly; leave it out, or strict."
            )
        choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
        if choices:
            choices = typed(choices, schema)
            mark = end.strip()
            if any(mark in one for one in choices):
                raise InvalidParameter(
                    f"A value that holds {mark} cannot be written in calls of the format {self.own.name}."
                )
            return " | ".join(self.literal(str(one) + end) for one in choices).join("()")
        close, mark = end.rstrip("\n"), end.strip()
        last, inside = (re.escape(one).replace("/", "\\/").replace("\\\n", "\\n") for one in (close, mark))
        text = f"{rule}_{number}_text"
        self.rules.append(f"{text}[lazy]: /(?s:.*){last}/ & ~/(?s:.*){inside}(?s:.+)/")
        return f"{text} {self.literal(end.removeprefix(close))}"


def call_grammar(
    own: ToolFormat, tools: Sequence[Tool], special: Mapping[str, int], *, parallel: bool = True, behind: str = ""
) -> Grammar:
    """Return the grammar of calls of tools, one or several, to the end of the answer.

    Arguments of strict tools are held to their schemas, those of others to be JSON objects.

    Args:
        own: the format.
        tools: what may be called, one at least.
        special: special tokens with their ids.
        parallel: whether several calls may follow one another.
        behind: what stands before already: the format's mark, or nothing.

    Raises:
        InvalidParameter: a schema is none, or has what the format or llguidance cannot hold calls to.
        MissingExtra: llguidance is not installed.
    """
    held = [Tool(one.name, {**ANY_OBJECT, **one.parameters} if one.strict else ANY_OBJECT) for one in tools]
    for one in held:
        if own.kind in ("tagged", "python"):
            check_shape(one.parameters)
        kind = one.parameters["type"]
        if kind != "object" and (not isinstance(kind, str) or kind in TYPES):
            raise InvalidParameter(
                f"The parameters of the tool {one.name} must be the schema of an object, not of the type {shown(kind)}."
            )
    rules = CallRules(own, special).calls(held, parallel=parallel, behind=behind)
    try:
        return Grammar.lark(rules)
    except InvalidParameter as error:
        for one in held:  # llguidance says where in the rules, which nobody has seen
            try:
                Grammar.json_schema(dict(one.parameters))
            except InvalidParameter as own_error:
                raise InvalidParameter(f"The parameters of the tool {one.name}: {own_error}") from error
        raise


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    """Return what matches JSON of a schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get(OPTIONS, BLANKS)
    return "%json " + json.dumps({**schema, OPTIONS: own})


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _properties(schema: Mapping[str, Any], own: ToolFormat) -> Mapping[str, Any]:
    """Return the arguments of a schema, of which the format has to know the names."""
    strange = sorted(schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "not", "patternProperties", "if"})
    if strange:
        raise InvalidParameter(
            f"Arguments with {strange[0]} cannot be held to it in calls of the format {own.name}; name them one by one "
            "as properties."
        )
    return schema.get("properties") or {}
