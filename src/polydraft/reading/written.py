"""What a model would draft at every place of a text that is written: one pass over the keys of another."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models import Cache, LanguageModel


def first_drafts(
    model: LanguageModel, cache: Cache, tokens: Int[Tensor, "t"], places: range, free: int
) -> Float[Tensor, "n V"]:
    """Return the logits of the tokens behind these places, each as if it were drafted there.

    A draft's law at place i follows from the keys that the cache holds of the tokens before, and from the model's own
    keys of token i. So the pass puts token i into a free slot, from which nothing else can be seen: what is known
    stays as it is.

    Args:
        model: the model, a variant of the one whose keys these are.
        cache: a row's keys of the tokens before the last place.
        tokens: the text.
        places: a run of places in it.
        free: the first free slot; there must be as many as places.
    """
    count, device = len(places), tokens.device
    numbers = torch.arange(places.start, places.stop, device=device)
    before = torch.arange(free, device=device) < numbers.unsqueeze(-1)
    mask = torch.cat([before, torch.eye(count, dtype=torch.bool, device=device)], 1).unsqueeze(0)
    own = tokens[places.start : places.stop].unsqueeze(0)
    return model.forward(own, numbers.unsqueeze(0), mask, cache, torch.tensor([free])).logits[0]
