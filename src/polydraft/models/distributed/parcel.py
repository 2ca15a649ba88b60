"""What one rank tells the others, as whole numbers alone: nothing that comes from elsewhere is ever unpickled."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from polydraft.errors import UnsupportedModel

RANKS = "polydraft_ranks"
"""Where a model notes who holds its other parts."""
WHOLE, BITS = 0, 1
"""How a tensor's entries stand in a parcel: as they are, or 64 truth values a word."""
WORD = 8
"""Bytes of a word."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """An operation with its arguments.

    Layout: its length in words, the operation, how many numbers, how many tensors, the numbers, each tensor's kind,
    number of axes and sizes, and then the entries of all tensors. A mask of n tokens over m slots takes n m / 64 words.

    Args:
        operation: which one.
        numbers: arguments that are whole numbers.
        tensors: arguments that are tensors, of whole numbers or truth values.
    """

    operation: int
    numbers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    def words(self) -> Int[Tensor, " w"]:
        """Return the parcel as words.

        Raises:
            UnsupportedModel: a tensor has other entries.
        """
        head, entries = [self.operation, len(self.numbers), len(self.tensors), *self.numbers], list[Tensor]()
        for one in self.tensors:
            kind, own = _entries(one)
            head += [kind, one.dim(), *one.shape]
            entries.append(own)
        body = torch.cat([torch.tensor(head), *entries])
        return torch.cat([torch.tensor([len(body) + 1]), body])

    @classmethod
    def of(cls, words: Int[Tensor, " w"]) -> "Parcel":
        """Return the parcel that words mean; those behind its length are not looked at."""
        length, operation, count, tensors = words[:4].tolist()
        place, shapes = 4 + count, list[tuple[int, tuple[int, ...]]]()
        numbers = tuple(words[4:place].tolist())
        for _ in range(tensors):
            kind, axes = words[place : place + 2].tolist()
            shapes.append((kind, tuple(words[place + 2 : place + 2 + axes].tolist())))
            place += 2 + axes
        found = list[Tensor]()
        for kind, shape in shapes:
            stop = place + _size(kind, prod(shape))
            found.append(_tensor(words[place:stop], kind, shape))
            place = stop
        assert place == length, "the parcel has another length than it says"
        return cls(operation, numbers, tuple(found))


def _size(kind: int, count: int) -> int:
    return -(-count // (8 * WORD)) if kind == BITS else count


def _entries(tensor: Tensor) -> tuple[int, Int[Tensor, " w"]]:
    plain = tensor.detach().cpu().reshape(-1)
    if plain.dtype == torch.int64:
        return WHOLE, plain
    if plain.dtype != torch.bool:
        raise UnsupportedModel(f"A target over several ranks takes no {plain.dtype} beside its tokens.")
    packed = np.packbits(plain.numpy())
    return BITS, torch.from_numpy(np.pad(packed, (0, -len(packed) % WORD)).view(np.int64))


def _tensor(words: Int[Tensor, " w"], kind: int, shape: Sequence[int]) -> Tensor:
    if kind == WHOLE:
        return words.view(shape)
    bits = np.unpackbits(words.contiguous().numpy().view(np.uint8), count=prod(shape))
    return torch.from_numpy(bits).bool().view(tuple(shape))
