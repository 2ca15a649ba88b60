"""What a head is trained on: the target's own text with the hidden states that it was written with, in shards.

A shard is a safetensors file of equally long rows:

    ids[n t]          token ids
    valid[n t]        1 where the target wrote the token, so that it may be asked for
    features[n t r]   the hidden states that heads read, layers joined in the folder's order; bfloat16
    final[n t d]      the hidden states behind the last norm, which give the target's law; bfloat16
    lse[n t]          log of the sum of exp of the target's logits at temperature 1, where the next token is valid

Rows are read one by one, so that a folder may be larger than memory.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from polydraft.errors import ResultsError
from polydraft.models import Layer

PARTS = ("ids", "valid", "features", "final", "lse")


class Shards(Dataset[dict[str, Tensor]]):
    """The rows of a folder's shards, as `{"ids": Int["t"], "valid": ..., ...}`.

    Args:
        files: the shards.
        reads: which layers' features are wanted, in this order; None for all of them.

    Raises:
        ResultsError: there is no shard, or the layers are not in them.
    """

    def __init__(self, files: list[Path], reads: tuple[Layer, ...] | None = None) -> None:
        if not files:
            raise ResultsError("There is no text of the target to train on.")
        self.files = files
        self.open: dict[int, Any] = {}
        self.layers = layers_of(files[0])
        missing = sorted(set(reads or ()) - set(self.layers))
        if missing:
            raise ResultsError(f"The features of layer {missing[0]} are not in {files[0].parent}.")
        self.wanted = [self.layers.index(one) for one in reads or self.layers]
        self.rows = [self._file(place).get_slice("ids").get_shape()[0] for place in range(len(files))]

    def _file(self, place: int) -> Any:
        if place not in self.open:
            self.open[place] = safe_open(str(self.files[place]), framework="pt")
        return self.open[place]

    def __len__(self) -> int:
        return sum(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = 0
        while index >= self.rows[place]:
            index, place = index - self.rows[place], place + 1
        file = self._file(place)
        row = {name: file.get_slice(name)[index : index + 1][0] for name in PARTS}
        features = row["features"].unflatten(-1, (len(self.layers), -1))[:, self.wanted]
        return {
            **row,
            "ids": row["ids"].long(),
            "features": features.flatten(-2).float(),
            "final": row["final"].float(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "open": {}}


def layers_of(file: Path) -> tuple[Layer, ...]:
    """Return which layers' outputs are in a shard, in their order."""
    with safe_open(str(file), framework="pt") as opened:
        return tuple(json.loads(opened.metadata()["layers"]))


def own_counts(files: list[Path], vocab_size: int) -> Tensor:
    """Return how often the target wrote each token, for a head with fewer tokens than the target."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            written = opened.get_tensor("ids")[opened.get_tensor("valid").bool()].long()
            counts += torch.bincount(written, minlength=vocab_size)
    return counts
