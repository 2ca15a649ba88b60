"""Models that were made of others, kept as long as these and their weights are what they were."""

from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from polydraft.models.weights import weights_of

_MADE = WeakKeyDictionary[PreTrainedModel, dict[Hashable, tuple[object, PreTrainedModel]]]()


def kept(model: PreTrainedModel, name: Hashable, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return what is made of a model under a name; it is made once, and anew when the model's weights have changed."""
    weights, known = weights_of(model), _MADE.setdefault(model, {})
    if name not in known or known[name][0] != weights:
        known[name] = (weights, make())
    return known[name][1]
