"""Fields of requests to the server, made of the options of a dataclass."""

from typing import Annotated, Any

from pydantic import Field

from polydraft.options.option import OptionField, options_of


def fields(options: type) -> dict[str, Any]:
    """Return the fields that requests have of a dataclass's options, as `pydantic.create_model` takes them."""
    return {one.name: _field(one) for one in options_of(options) if one.option.field is not None}


def _field(one: OptionField) -> tuple[Any, Any]:
    """Return a field's type, within its bounds, and its default: a whole number is a number too, a text is none."""
    field, bounds = one.option.field, one.option.range
    assert field is not None
    told: dict[str, Any] = {"strict": True} | ({"allow_inf_nan": False} if one.kind is float else {})
    if bounds is not None:
        least = bounds.least if field.least is None else field.least
        told |= {"le": bounds.most if field.most is None else field.most}
        told |= {"gt": bounds.above} if least is None else {"ge": least}
    if field.longest is not None:
        told |= {"min_length": 1, "max_length": field.longest}
    hint: Any = Annotated[one.kind, Field(**{name: value for name, value in told.items() if value is not None})]
    return (hint | None if field.default is None else hint), field.default
