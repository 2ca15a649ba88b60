"""How a draft model that is made of the target is named: "self:int8", "self:skip=12-19", "self:int8,skip=20"."""

import re

from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter
from polydraft.fetched import DERIVED
from polydraft.models.derived.copying import kept, without_layers
from polydraft.models.derived.int8 import in_int8

INT8 = "int8"
SKIP = re.compile(r"skip=(\d{1,4})(?:-(\d{1,4}))?")


def check_word(name: str) -> tuple[bool, frozenset[int]]:
    """Return whether the weights have eight bits, and which layers are skipped.

    Raises:
        InvalidParameter: the name says something else.
    """
    parts, layers = name.removeprefix(DERIVED).split(","), set[int]()
    for part in parts:
        found = SKIP.fullmatch(part)
        named = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        layers |= {*named}
        if not named and part != INT8:
            raise InvalidParameter(
                f"The draft model {name!r} is not known: one made of the target is self:int8, self:skip=12-19 (layers, "
                "counted from 0), or self:int8,skip=12-19."
            )
    return INT8 in parts, frozenset(layers)


def derived(target: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the draft model that a name means, made of the target; the same one as long as its weights are.

    Raises:
        InvalidParameter: the name says something else, or skips layers that are not there.
        UnsupportedModel: it cannot be made of this target.
    """
    short, skipped = check_word(name)

    def make() -> PreTrainedModel:
        made = without_layers(target, skipped) if skipped else target
        return in_int8(made) if short else made

    return kept(target, name, make)
