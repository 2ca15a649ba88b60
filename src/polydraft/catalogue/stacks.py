"""Stacks of drafters as they are written: "pair-draft < ngram", "self:int8@2 ngram@6", and both together.

`A < B`: B drafts for A, whose text is the draft. `A@2 B@6`: two tokens of A, and six of B behind them. `A@4 < B` lets A
write four tokens. A stack in parentheses stands for a drafter: `(A < B)@2 C@6`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from polydraft.errors import InvalidParameter, shown

SIGN = re.compile(r"[()<]|[^\s()<]+")
LENGTH = re.compile(r"(.*)@([0-9]{1,7})")
HOW = 'write "A < B", where B drafts for A, or "A@2 B@6", two tokens of A and then six of B'


@dataclass(frozen=True)
class StackPart:
    """A drafter of a stack.

    Args:
        drafter: the word or name that it goes by, or a stack of its own.
        length: the tokens that it writes; None where that is not said.
    """

    drafter: "str | WrittenStack"
    length: int | None


@dataclass(frozen=True)
class WrittenStack:
    """A stack as it was written.

    Args:
        levels: from the top down, each drafting for the one before it; the parts of a level draft one behind the other.
    """

    levels: tuple[tuple[StackPart, ...], ...]


def parse_stack(text: str) -> WrittenStack:
    """Read a stack.

    Raises:
        InvalidParameter: it is none: a part or a length is missing, or several stand where one must; the text says
            what.
    """
    signs = SIGN.findall(text)
    stack, rest = _stack(text, signs)
    if rest:
        raise _refused(text, "it has a ) too many")
    if len(stack.levels) == 1 and len(stack.levels[0]) == 1:
        raise _refused(text, "it has one drafter alone, whose tokens the tree counts, as in chain:4")
    return stack


def _stack(text: str, signs: Sequence[str]) -> tuple[WrittenStack, Sequence[str]]:
    """Read the levels up to the end or a closing parenthesis, and return what is left."""
    levels = list[tuple[StackPart, ...]]()
    while True:
        parts = list[StackPart]()
        while signs and signs[0] not in "<)":
            part, signs = _part(text, signs)
            parts.append(part)
        _check_level(text, parts, first=bool(signs) and signs[0] == "<")
        levels.append(tuple(parts))
        if not signs or signs[0] == ")":
            return WrittenStack(tuple(levels)), signs
        signs = signs[1:]


def _part(text: str, signs: Sequence[str]) -> tuple[StackPart, Sequence[str]]:
    if signs[0] == "(":
        stack, rest = _stack(text, signs[1:])
        if not rest:
            raise _refused(text, "a ) is missing")
        counted = LENGTH.fullmatch(rest[1]) if len(rest) > 1 and rest[1].startswith("@") else None
        return StackPart(stack, _length(text, counted)), rest[2 if counted else 1 :]
    counted = LENGTH.fullmatch(signs[0])
    word = counted[1] if counted else signs[0]
    if not word or word.startswith("@"):
        raise _refused(text, f"a drafter is missing before {signs[0]}")
    return StackPart(word, _length(text, counted)), signs[1:]


def _length(text: str, counted: re.Match[str] | None) -> int | None:
    if counted is not None and not int(counted[2]):
        raise _refused(text, "a drafter writes at least one token")
    return None if counted is None else int(counted[2])


def _check_level(text: str, parts: Sequence[StackPart], *, first: bool) -> None:
    """Check one level; what others draft for is one model or view."""
    if not parts:
        raise _refused(text, "a drafter is missing")
    if first and (len(parts) > 1 or isinstance(parts[0].drafter, WrittenStack)):
        raise _refused(text, "before each < one model or view of the target must stand, whose text is the draft")
    from polydraft.trees.tree import MOST_NODES  # not before it is needed: words are read without torch

    if sum(part.length or 0 for part in parts) >= MOST_NODES:
        raise _refused(text, f"drafts of a level have {MOST_NODES - 1} tokens at most")
    if len(parts) > 1 and any(part.length is None for part in parts):
        raise _refused(text, "drafters one behind the other must each say how many tokens they write, as ngram@6")


def _refused(text: str, why: str) -> InvalidParameter:
    return InvalidParameter(f"The stack {shown(text)} cannot be read: {why}; {HOW}.")
