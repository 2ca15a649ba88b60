"""Passes in evaluation mode, for logits alone, over models that stay in the mode that they are in."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from threading import Lock

from torch import nn
from transformers import PreTrainedModel

OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings of a configuration by which a model returns more than its logits, or computes more of it."""
TRAINING = attrgetter("training")
_LOCK = Lock()
_HELD: dict[int, int] = {}
"""How many passes hold each module in evaluation mode that was in training, by its identity."""


def for_logits(model: PreTrainedModel) -> dict[str, bool]:
    """Return what a pass is told so that it returns its logits and its cache, whatever the configuration says."""
    taken = inspect.signature(model.forward).parameters
    open_to_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    configs = (model.config, model.config.get_text_config(decoder=True))
    asked = [name for name in OUTPUTS if any(getattr(one, name, False) for one in configs)]
    told = {name: False for name in asked if open_to_all or name in taken}
    return told if model.config.return_dict else {**told, "return_dict": True}


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for a while; each goes back to its own mode, also after an error.

    Passes of several threads may share modules: the last one that ends gives them their mode back. The flags are set
    one by one and not by `train`, which some layers override to merge or freeze weights.
    """
    held: list[nn.Module] = []
    try:
        with _LOCK:
            if _HELD or any(map(TRAINING, modules)):
                for one in modules:
                    if one.training or id(one) in _HELD:
                        held.append(one)
                        _HELD[id(one)] = _HELD.get(id(one), 0) + 1
                        one.training = False
        yield
    finally:
        if held:
            _let_go(held)


def _let_go(held: Sequence[nn.Module]) -> None:
    with _LOCK:
        for one in held:
            _HELD[id(one)] = _HELD.get(id(one), 1) - 1
            if not _HELD[id(one)]:
                del _HELD[id(one)]
                one.training = True
