"""The checker that pytest puts around polydraft: beartype, with int counting as float as in every type checker."""

from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecked(made: Any) -> Any:
    """Check the calls of a function; one of its own class, or of protocols that are not looked at, stays as it is."""
    try:
        return checked(made)
    except (BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception):
        return made
