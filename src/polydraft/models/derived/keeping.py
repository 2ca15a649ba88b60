"""Models that were made of others, kept as long as these compute what they did."""

from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from polydraft.models.weights import function_of

_MADE = WeakKeyDictionary[PreTrainedModel, dict[Hashable, tuple[object, PreTrainedModel]]]()


def kept(model: PreTrainedModel, name: Hashable, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return what is made of a model under a name; it is made once, and anew when the model has changed."""
    function, known = function_of(model), _MADE.setdefault(model, {})
    if name not in known or known[name][0] != function:
        known[name] = (function, make())
    return known[name][1]
