"""The checker that pytest puts around polydraft: beartype, with int counting as float as in every type checker."""

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
