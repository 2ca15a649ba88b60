"""Calls as in Python: their arguments as JSON values."""

import ast
import json
import warnings
from typing import Any

from polydraft.models.tools.tape import BrokenCallError

WORDS = {"true": True, "false": False, "null": None}
MOST = 200_000
"""Characters of a call at most."""


def keyword_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call from what stands between its parentheses: literals, each with its name.

    Raises:
        BrokenCallError: they are something else.
    """
    if len(text) > MOST:
        raise BrokenCallError
    source = f"f({text})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange escapes
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            raise BrokenCallError
        lines = source.splitlines(keepends=True)
        return {str(one.arg): _value(one.value, lines) for one in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenCallError from error


def _value(node: ast.expr, lines: list[str]) -> Any:
    match node:
        case ast.Constant(value=str()):
            return _text(node, lines)
        case ast.Constant(value=bool() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in WORDS:
            return WORDS[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(one, lines) for one in parts]
        case ast.Dict(keys=keys, values=values):
            names = [None if one is None else _value(one, lines) for one in keys]
            if not all(isinstance(name, str) for name in names):
                raise BrokenCallError
            return dict(zip(names, (_value(one, lines) for one in values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise BrokenCallError


def _text(node: ast.Constant, lines: list[str]) -> str:
    """Return a text; one that is JSON as well is read as JSON, whose escapes are others."""
    if node.lineno == node.end_lineno:
        line = lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode("utf-8", "replace")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, str):
            return found
    return str(node.value)
