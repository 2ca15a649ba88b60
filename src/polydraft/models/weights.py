"""Whether a model's weights are what they were."""

from torch import nn


def weights_of(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return what changes when a model's weights are changed or moved: their places in memory and their versions."""
    versions = ((one, 0 if one.is_inference() else one._version) for one in model.parameters())
    return tuple((one.data_ptr(), version) for one, version in versions)
