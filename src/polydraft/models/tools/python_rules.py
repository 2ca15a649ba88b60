"""Arguments of calls as in Python, as rules of a grammar: JSON schemas whose values are Python's literals."""

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from polydraft.errors import InvalidParameter, shown

SIMPLE = {"boolean": '("True" | "False")', "null": '"None"'}
KNOWN = frozenset(
    "type properties required additionalProperties items enum const anyOf oneOf $ref $defs definitions description "
    "title default examples $comment $schema minItems maxItems strict x-guidance".split()
)
OF_SCALARS = frozenset(
    "pattern format minLength maxLength minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)


class PythonRules:
    """Writes rules for the values of a schema; `rules` has those that were needed.

    Args:
        prefix: what the names of rules begin with.
        root: the schema in which references are looked up.
    """

    def __init__(self, prefix: str, root: Mapping[str, Any]) -> None:
        self.prefix, self.root, self.rules = prefix, root, list[str]()
        self._named = dict[str, str]()

    def keywords(self, schema: Mapping[str, Any]) -> str:
        """Return what matches the arguments of a call: `name=value`, in the schema's order."""
        self._check(schema)
        check_names(schema)
        for key in _properties(schema):
            if not key.isidentifier() or keyword.iskeyword(key):
                raise InvalidParameter(
                    f"An argument named {shown(key)} cannot be written in calls as in Python; rename it, or leave "
                    "strict out."
                )
        whole = sorted(schema.keys() & {"$ref", "anyOf", "oneOf", "enum", "const"})
        if whole or (is_open(schema) and schema.get("additionalProperties") not in (None, True)):
            named = whole[0] if whole else "additionalProperties"
            raise InvalidParameter(
                f"Arguments with {named} cannot be held to it in calls as in Python; name them one by one as "
                "properties."
            )
        wanted = schema.get("required") or ()
        pairs = [
            (f"{json.dumps(f'{key}=')} {self.value(one)}", key in wanted) for key, one in _properties(schema).items()
        ]
        return self._listed(pairs)

    def value(self, schema: Any) -> str:
        """Return what matches a value of a schema.

        Raises:
            InvalidParameter: the schema has what cannot be held to.
        """
        if schema is True or schema == {}:
            return self._any()
        if not isinstance(schema, Mapping):
            raise InvalidParameter(f"A schema of an argument is {shown(schema)}, which no value of Python's has.")
        self._check(schema)
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]))
        if "enum" in schema or "const" in schema:
            choices = typed(schema["enum"] if "enum" in schema else [schema["const"]], schema)
            return " | ".join(json.dumps(_literal(one), ensure_ascii=False) for one in choices).join("()")
        others = schema.get("anyOf") or schema.get("oneOf")
        if others:
            beside = sorted(schema.keys() & (OF_SCALARS | {"type", "properties", "required", "items"}))
            if beside:
                raise InvalidParameter(
                    f"A schema with anyOf or oneOf and {beside[0]} beside it cannot be held to in calls as in Python; "
                    f"put {beside[0]} into its parts."
                )
            return " | ".join(map(self.value, others)).join("()")
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return " | ".join(self.value({**schema, "type": one}) for one in kinds).join("()")
        if kinds is None and "properties" in schema:
            kinds = "object"
        return self._any() if kinds is None else self._of(str(kinds), schema)

    def _of(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in SIMPLE:
            return SIMPLE[kind]
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return "%json " + json.dumps({name: one for name, one in schema.items() if name in OF_SCALARS} | {"type": kind})

    def _array(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self.value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'(", " {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        inside = f"{item} {more}"
        return f'"[" {inside} "]"' if least else f'"[" ({inside})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        check_names(schema)
        wanted = schema.get("required") or ()
        if not _properties(schema):
            pair = f'%json {{"type": "string"}} ": " {self.value(schema.get("additionalProperties", True) or True)}'
            empty = schema.get("additionalProperties") is False
            return '"{}"' if empty else f'"{{" ({pair} (", " {pair})*)? "}}"'
        pairs = [
            (f"{json.dumps(json.dumps(key) + ': ')} {self.value(one)}", key in wanted)
            for key, one in _properties(schema).items()
        ]
        return f'"{{" {self._listed(pairs)} "}}"'

    def _listed(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Return what matches parts in order with commas between them, those that are not needed or not."""
        if not parts:
            return '""'
        rest, first = "", '""'
        for part, needed in reversed(parts):
            name = self._rule(part)
            own = f"{name} {rest}"
            first = own if needed else f"({own} | {first})"
            rest = self._rule(f'", " {name} {rest}') if needed else self._rule(f'(", " {name})? {rest or chr(34) * 2}')
        return f"({first})"

    def _rule(self, text: str) -> str:
        name = f"{self.prefix}_p{len(self.rules)}"
        self.rules.append(f"{name}: {text}")
        return name

    def _any(self) -> str:
        """Return the rule of all literals."""
        if "any" not in self._named:
            self._named["any"] = name = f"{self.prefix}_any"
            text = '%json {"type": "string"}'
            self.rules.append(
                f'{name}: {text} | %json {{"type": "number"}} | "True" | "False" | "None" '
                f'| "[" ({name} (", " {name})*)? "]" | "{{" ({text} ": " {name} (", " {text} ": " {name})*)? "}}"'
            )
        return self._named["any"]

    def _referred(self, reference: str) -> str:
        if reference not in self._named:
            found: Any = self.root
            for step in reference.removeprefix("#").split("/")[1:]:
                found = found.get(step) if isinstance(found, Mapping) else None
            if found is None or not reference.startswith("#"):
                raise InvalidParameter(f"A schema refers to {shown(reference)}, which is not in it.")
            self._named[reference] = name = f"{self.prefix}_r{len(self._named)}"
            self.rules.append(f"{name}: {self.value(found)}")
        return self._named[reference]

    def _check(self, schema: Mapping[str, Any]) -> None:
        strange = sorted(schema.keys() - KNOWN - OF_SCALARS)
        if strange:
            raise InvalidParameter(
                f"Arguments with {strange[0]} cannot be held to it in calls as in Python; leave it out, or strict."
            )


TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "array": list,
    "object": Mapping,
}


def typed(choices: Sequence[Any], schema: Mapping[str, Any]) -> list[Any]:
    """Return the choices that have the type, or one of the types, that the schema names beside them.

    Raises:
        InvalidParameter: none has.
    """
    kinds = schema.get("type", [*TYPES])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    found = [one for one in choices if any(_has_type(one, kind) for kind in kinds)]
    if not found:
        raise InvalidParameter(
            f"None of the values {shown(choices)} has the type {shown(schema.get('type'))} beside them."
        )
    return found


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return whole or isinstance(value, TYPES.get(kind, ()))


SHAPES: Mapping[str, type] = {
    **dict.fromkeys(("properties", "$defs", "definitions"), Mapping),
    **dict.fromkeys(("required", "enum", "anyOf", "oneOf"), list),
    **dict.fromkeys(("minItems", "maxItems"), int),
    "$ref": str,
}


def check_shape(schema: Any) -> None:
    """Check that keywords have values of their kinds, in a schema and those inside it.

    Raises:
        InvalidParameter: one has not.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InvalidParameter(f"A schema of an argument is {shown(schema)}, which is no JSON schema.")
    wrong = [name for name, kind in SHAPES.items() if name in schema and not isinstance(schema[name], kind)]
    if not wrong and not all(isinstance(name, str) for name in schema.get("required", ())):
        wrong = ["required"]
    if wrong:
        raise InvalidParameter(f"A schema's {wrong[0]} is {shown(schema[wrong[0]])}, which no JSON schema has.")
    inside = [*schema.get("properties", {}).values(), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    inside += [*schema.get("$defs", {}).values(), *schema.get("definitions", {}).values()]
    for one in [*inside, *(schema[name] for name in ("items", "additionalProperties") if name in schema)]:
        check_shape(one)


def check_names(schema: Mapping[str, Any]) -> None:
    """Check that what a schema requires is among its properties.

    Raises:
        InvalidParameter: it requires a name that it does not describe.
    """
    unknown = [name for name in schema.get("required") or () if name not in _properties(schema)]
    if unknown:
        raise InvalidParameter(
            f"A schema requires {shown(unknown[0])}, which is none of its properties; describe it, or leave it out."
        )


def is_open(schema: Mapping[str, Any]) -> bool:
    """Tell whether a schema leaves open what arguments there are."""
    return "properties" not in schema and schema.get("additionalProperties") is not False


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("properties") or {}


def _literal(value: Any) -> str:
    """Return a JSON value as Python writes it, with texts as JSON has them."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(name)}: {_literal(one)}' for name, one in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
