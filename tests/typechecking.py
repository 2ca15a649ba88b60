"""The checker that pytest puts around polydraft: beartype, with int counting as float as in every type checker."""

import ast
import inspect
from functools import wraps
from types import FunctionType
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecked(made: Any) -> Any:
    """Return a function whose calls are checked.

    One that returns `Self`, or takes a protocol that `isinstance` refuses, cannot be checked and stays as it is.
    """
    try:
        return checked(made)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        return made


def compile_sources() -> None:
    """Let machine code be made of what stands in the files: numba takes no function in a function that is checked."""
    from polydraft import machine_code

    made = machine_code._made
    machine_code._made = lambda own: made(_as_written(own))  # type: ignore[assignment]


def _as_written(own: FunctionType) -> FunctionType:
    lines, first = inspect.getsourcelines(own)
    tree = ast.increment_lineno(ast.parse("".join(lines)), first - 1)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    names = dict(own.__globals__)
    exec(compile(tree, own.__code__.co_filename, "exec"), names)
    return wraps(own)(FunctionType(names[own.__name__].__code__, own.__globals__, own.__name__, own.__defaults__))
