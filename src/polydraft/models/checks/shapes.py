"""The shapes of a model's keys and values, which some models' layers do not share."""

from typing import Any

import torch
from transformers import PreTrainedModel

from polydraft.models.checks.evaluation import evaluating
from polydraft.models.checks.supported import cache_name

PLACE = "polydraft_shapes"


def kept_shapes(model: PreTrainedModel) -> tuple[tuple[int, int], ...] | None:
    """Return the heads and the width of each layer's keys and values, in turn; None where all are the same.

    They are what the model itself puts into a cache in a pass over one token, which is run once per model. None as well
    if this fails: a trial of trees tells why. Layers that keep nothing have the shape (0, 0).
    """
    if PLACE not in model.__dict__:
        model.__dict__[PLACE] = _found(model)
    return model.__dict__[PLACE]


def _found(model: PreTrainedModel) -> tuple[tuple[int, int], ...] | None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad(), evaluating(list(model.modules())):
            layers: list[Any] = list(model(input_ids=token, use_cache=True)[cache_name(model)].layers)
        pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
        found = tuple((0, 0) if one is None else (one.shape[1], one.shape[3]) for pair in pairs for one in pair)
    except Exception:  # noqa: BLE001  whatever it is, the answer is no
        return None
    missing = 2 * int(model.config.get_text_config().num_hidden_layers) - len(found)
    alike = len({*found}) < 2 and (0, 0) not in found
    return None if alike else (*found, *[(0, 0)] * max(0, missing))
