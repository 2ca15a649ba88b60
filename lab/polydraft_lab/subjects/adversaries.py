"""Draft models that do not pay: one that knows nothing, and one that is as slow as the target."""

import copy
from typing import TypeVar

import torch
from torch import Generator, nn

NOISE = 0.3
"""The standard deviation of the noise in a slow draft's weights, in that of the weights."""
Model = TypeVar("Model", bound=nn.Module)


def shuffled(model: Model, stream: Generator) -> Model:
    """Return a copy of a draft model with each of its weights in random order: it costs as much and knows nothing."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            order = torch.randperm(weight.numel(), generator=stream).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))
    return twin


def noisy(model: Model, stream: Generator) -> Model:
    """Return a copy of a target with noise in its weights: as slow as the target, and right now and then."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            noise = torch.randn(weight.shape, generator=stream).to(weight)
            weight.add_(NOISE * weight.std() * noise)
    return twin
