"""Calls of tools, read from a text that comes in pieces: a reader for each kind of format."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polydraft.models.tools.call_formats import ToolFormat
from polydraft.models.tools.literals import keyword_arguments
from polydraft.models.tools.tape import BrokenCallError, Reading, Tape, parsed

NAME = re.compile(r"[^\s<>\"'(){}\[\]]{1,256}")
"""What may be a function's name; OpenAI's have letters, digits, dashes and underscores."""
NUMBER = re.compile(r":\d+$")
WORDS_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
BRACKETS = re.compile(r"[()\[\]{}\"'\\]")


class CallSink(Protocol):
    """What takes a call: its name once, then pieces of the JSON of its arguments."""

    def begin(self, name: str) -> None:
        """Take the name.

        Raises:
            BrokenCallError: there is no such function, and what was read may be something else than a call.
        """

    def put(self, text: str) -> None:
        """Take a piece of the arguments."""


def read_call(tape: Tape, own: ToolFormat, sink: CallSink, tools: Mapping[str, Any]) -> Reading:
    """Read a call behind what all calls of a format begin with.

    Args:
        tape: the text.
        own: the format.
        sink: what takes the call.
        tools: the schemas of the arguments by the functions' names.

    Raises:
        BrokenCallError: it is none, or the text ends within it.
    """
    readers: dict[str, Callable[..., Reading]] = {
        "json": _read_object,
        "header": _read_header,
        "tagged": _read_tagged,
        "python": _read_python,
    }
    yield from readers[own.kind](tape, own, sink, tools)


def named(text: str) -> str:
    """Return a function's name without blanks around it.

    Raises:
        BrokenCallError: it cannot be one.
    """
    if not NAME.fullmatch(text.strip()):
        raise BrokenCallError
    return text.strip()


def _begun(tape: Tape, sink: CallSink, name: object) -> None:
    """Begin a call; nobody goes back behind here."""
    if not isinstance(name, str):
        raise BrokenCallError
    sink.begin(named(name))
    tape.kept = False


def _read_object(tape: Tape, own: ToolFormat, sink: CallSink, tools: Mapping[str, Any]) -> Reading:
    """Read an object with a name and arguments, in either order; of what else it has nothing is told."""
    keys = {own.key, "arguments", "parameters"}
    name, held, told = None, None, False
    yield from tape.expect("{")
    while not (yield from tape.has("}")):
        key = yield from tape.whole_value()
        yield from tape.expect(":")
        if key == "name" and not told:
            name = yield from tape.whole_value()
        elif key in keys and not told and name is not None:
            _begun(tape, sink, name)
            told = True
            yield from _read_value(tape, sink)
        elif key in keys and not told:
            parts: list[str] = []
            yield from tape.value(parts.append)
            held = "".join(parts)
        else:
            yield from tape.whole_value()
        yield from tape.has(",")
    if told:
        return
    if held is None and own.anchored:
        raise BrokenCallError
    _begun(tape, sink, name)
    sink.put("{}" if held is None else _unquoted(held))


def _read_value(tape: Tape, sink: CallSink) -> Reading:
    """Read arguments; some models write them as a text that holds JSON."""
    yield from tape.skip_blanks()
    if not tape.left.startswith('"'):
        yield from tape.value(sink.put)
        return
    parts: list[str] = []
    yield from tape.value(parts.append)
    sink.put(_unquoted("".join(parts)))


def _unquoted(text: str) -> str:
    return str(parsed(text)) if text.startswith('"') else text


def _read_header(tape: Tape, own: ToolFormat, sink: CallSink, tools: Mapping[str, Any]) -> Reading:
    """Read a name, and behind what follows names its arguments."""
    yield from tape.expect(own.head)
    first, *others = own.infix.split()
    name = yield from tape.until((first,))
    name = name.split(own.aside)[0] if own.aside else name
    _begun(tape, sink, NUMBER.sub("", name.strip()) if own.counted else name)
    yield from tape.expect(" ".join(others))
    yield from _read_value(tape, sink)


def _read_tagged(tape: Tape, own: ToolFormat, sink: CallSink, tools: Mapping[str, Any]) -> Reading:
    """Read a name, and arguments of which each has marks of its own; texts are written plainly, all else as JSON."""
    yield from tape.expect(own.head)
    name_end = own.name_end.strip() or "\n"
    begun = tape.at
    while not (found := re.compile(f"{name_end}|<").search(tape.text, begun)):
        yield from tape.more()
    name = tape.text[begun : found.start()]
    tape.at = found.start() + (found[0] == name_end)
    _begun(tape, sink, name)
    schemas = (tools.get(name.strip()) or {}).get("properties") or {}
    key_end, *opening = own.key_end.split()
    before, known = "{", set[str]()
    while (yield from tape.has(own.key_begin)):
        key = (yield from tape.until((key_end,))).strip()
        if key in known:
            raise BrokenCallError
        known.add(key)
        for word in opening:
            yield from tape.expect(word)
        text = yield from _tagged_value(tape, own.value_end.strip(), schemas.get(key))
        if own.key_end.endswith("\n"):
            text = text.removeprefix("\n").removesuffix("\n")
        sink.put(f"{before}{json.dumps(key, ensure_ascii=False)}: {_as_json(text, schemas.get(key))}")
        before = ", "
    begun = tape.at
    yield from tape.expect(own.call_end)  # else the next argument is cut off
    tape.at = begun
    sink.put("{}" if before == "{" else "}")


def _tagged_value(tape: Tape, end: str, schema: Any) -> Reading:
    """Return the text of an argument before its end mark, which inside the texts of a JSON value is none."""
    parts: list[str] = []
    if isinstance(schema, Mapping) and not is_plain_text(schema):
        yield from tape.skip_blanks()
        if tape.left.startswith(("{", "[", '"')):
            yield from tape.value(parts.append)
    rest = yield from tape.until((end,))
    return "".join(parts) + rest


def _as_json(text: str, schema: Any) -> str:
    """Return the JSON of an argument: of a text where its schema says so, else of what it is, or of a text.

    Models whose templates write values as Python does say True, False and None.
    """
    if not is_plain_text(schema):
        word = WORDS_OF_PYTHON.get(text.strip(), text.strip())
        try:
            parsed(word)
            return word
        except BrokenCallError:
            pass
    return json.dumps(text, ensure_ascii=False)


def is_plain_text(schema: Any) -> bool:
    """Tell whether all values of a schema are texts, so that they can be written without quotes."""
    if not isinstance(schema, Mapping):
        return False
    choices = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return schema.get("type") == "string" or (bool(choices) and all(isinstance(one, str) for one in choices))


def _read_python(tape: Tape, own: ToolFormat, sink: CallSink, tools: Mapping[str, Any]) -> Reading:
    """Read a call as in Python; it is told when it is whole."""
    name = named((yield from tape.until(("(",))))
    if own.anchored and tools and name not in tools:
        raise BrokenCallError
    begun, depth, quote, place = tape.at, 1, "", tape.at
    while depth:
        found = BRACKETS.search(tape.text, place)
        if found is None or (found[0] == "\\" and found.end() == len(tape.text)):
            place = len(tape.text) if found is None else found.start()
            yield from tape.more()
            continue
        sign, place = found[0], found.end() + (found[0] == "\\")
        if sign in "\"'":
            quote = sign if not quote else "" if quote == sign else quote
        elif not quote and sign != "\\":
            depth += 1 if sign in "([{" else -1
    try:
        arguments = json.dumps(keyword_arguments(tape.text[begun : place - 1]), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise BrokenCallError from error
    tape.at = place
    _begun(tape, sink, name)
    sink.put(arguments)
