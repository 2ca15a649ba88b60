"""The weights of what learns, in a file of safetensors: to go on from a trial in another run."""

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from polydraft.errors import ResultsError


def write_weights(training: nn.Module, path: Path) -> None:
    """Write all weights, beside their place first.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    beside = path.with_suffix(".part")
    save_file({name: value.detach().cpu().contiguous() for name, value in training.state_dict().items()}, beside)
    os.replace(beside, path)


def read_weights(training: nn.Module, path: Path) -> None:
    """Give something that learns the weights of a file.

    Raises:
        ResultsError: they are missing, damaged or of other shapes.
    """
    try:
        training.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise ResultsError(f"{path} cannot be gone on with; begin in an empty folder.") from error
