"""Linear layers whose weights have few bits: eight, with a scale for each row, or four, with a grid for each 32."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.anatomy import weight_of

Product = Callable[[Float[Tensor, "r i"]], Float[Tensor, "r o"]]
STEPS = 127
MOST_ROWS = 64
"""Of more rows than this the kernels are slower than a product with unpacked weights."""
BLOCK = 16
"""Kernels read so many columns at a time, beyond the end of a row if they must, and write so many rows."""
GROUP = 32
"""So many weights of four bits share a scale and a zero."""
LEVELS = 15
SMALLEST = 2.0**-120
"""No step is smaller."""


class FewBits(nn.Linear):
    """A linear layer with weights of few bits, whose products are computed in bfloat16.

    Layers around it, such as adapters, may look at its `weight`: that is the matrix that the bits stand for.

    Attributes:
        bits: how many a weight has.
        numbers: the bits, a row for each output.
        scales: what they are multiplied by, and more, a row for each output.
    """

    bits: int
    numbers: nn.Parameter
    scales: nn.Parameter

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.training, self.precision = plain.training, plain.weight.dtype
        self.in_features, self.out_features = plain.in_features, plain.out_features
        numbers, scales = self.shortened(plain.weight.detach())
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = plain.bias

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  there is no such parameter
        """The matrix, in the precision that it had."""
        return self.matrix(self.numbers, self.scales).to(self.precision)

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias."""
        state = [weight_of(one) for one in (self.numbers, self.scales)]
        known = self.__dict__.get("polydraft_product")
        if known is None or known[0] != state:
            known = self.__dict__["polydraft_product"] = state, self.product(self.numbers, self.scales, None)
        made = known[1](input.reshape(-1, self.in_features)).view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FewBits":
        """Move the weights, or change their precision: scales keep the one that they have."""
        scales = self.scales.detach().clone()
        super()._apply(fn, recurse)
        self.precision = fn(torch.empty(0, dtype=self.precision)).dtype
        if self.scales.dtype != scales.dtype:
            self.scales = nn.Parameter(scales.to(self.scales.device), requires_grad=False)
        return self

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "polydraft_product"}

    @staticmethod
    @abstractmethod
    def shortened(weight: Float[Tensor, "o i"]) -> tuple[Tensor, Tensor]:
        """Return the nearest numbers of few bits, and their scales."""

    @staticmethod
    @abstractmethod
    def matrix(numbers: Tensor, scales: Tensor) -> Float[Tensor, "o i"]:
        """Return the matrix that they stand for."""

    @staticmethod
    @abstractmethod
    def multiplied(numbers: Tensor, scales: Tensor) -> Product:
        """Return the kernel's product with a few rows in bfloat16."""

    @classmethod
    def product(cls, numbers: Tensor, scales: Tensor, bias: Float[Tensor, " o"] | None) -> Product:
        """Return rows -> rows @ weight.T + bias; more than a few rows are multiplied by the unpacked matrix.

        Rows and results are rounded in both cases, and weights in neither, so that a row's product hardly depends on
        how many rows there are.
        """
        few = cls.multiplied(numbers, scales)

        def product(rows: Float[Tensor, "r i"]) -> Float[Tensor, "r o"]:
            short = rows.to(torch.bfloat16)
            if len(rows) > MOST_ROWS or rows.shape[1] % BLOCK:
                out = functional.linear(short.float(), cls.matrix(numbers, scales).float()).to(torch.bfloat16)
            else:
                out = few(short)
            return out.to(rows.dtype) if bias is None else out.to(rows.dtype) + bias

        return product

    @classmethod
    def joined(cls, layers: Sequence["FewBits"], order: Int[Tensor, " o"] | None, bias: Tensor | None) -> Product:
        """Return the product with the weights of several layers of one input, their outputs beside each other."""
        parts = torch.cat([one.numbers for one in layers]), torch.cat([one.scales for one in layers])
        numbers, scales = parts if order is None else (one[order] for one in parts)
        return cls.product(numbers, scales, bias)


class Int8Linear(FewBits):
    """Weights of eight bits, whole multiples of a step of each row."""

    bits = 8

    @staticmethod
    def shortened(weight):
        """Return the nearest multiples of each row's step, and the steps: numbers that bfloat16 has too."""
        whole = weight.float()
        scales = (whole.abs().amax(dim=1) / STEPS).clamp_min(SMALLEST).bfloat16().float()
        return (whole / scales.unsqueeze(1)).round().clamp(-STEPS, STEPS).to(torch.int8), scales

    @staticmethod
    def matrix(numbers, scales):
        """Return the matrix that they stand for."""
        return numbers * scales.unsqueeze(1)

    @staticmethod
    def multiplied(numbers, scales):
        """Return the kernel's product with a few rows in bfloat16."""
        short = scales.to(torch.bfloat16)
        return lambda rows: torch.ops.aten._weight_int8pack_mm(rows, numbers, short)


class Int4Linear(FewBits):
    """Weights of four bits, two in a byte: least + scale * number, with `least` and scale of each 32 of a row.

    The grid is that of Q4_1 files, with scales in bfloat16.
    """

    bits = 4

    @staticmethod
    def shortened(weight):
        """Return the nearest numbers, two in a byte, and for each group of a row its scale and its middle."""
        groups = weight.float().unflatten(1, (-1, GROUP))
        least, most = groups.amin(-1), groups.amax(-1)
        scale = ((most - least) / LEVELS).clamp_min(SMALLEST).bfloat16()
        middle = (least + 8 * scale.float()).bfloat16()
        steps = (groups - middle.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
        numbers = (steps + 8).round().clamp(0, LEVELS).to(torch.uint8).flatten(1)
        return numbers[:, ::2] | numbers[:, 1::2] << 4, torch.stack([scale, middle], -1)

    @staticmethod
    def matrix(numbers, scales):
        """Return the matrix that they stand for."""
        groups = _unpacked(numbers).float().unflatten(1, (-1, GROUP)) - 8
        return (groups * scales[..., :1].float() + scales[..., 1:].float()).flatten(1)

    @staticmethod
    def multiplied(numbers, scales):
        """Return the kernel's product with a few rows in bfloat16."""
        missing = -len(numbers) % BLOCK
        whole = functional.pad(_unpacked(numbers), (0, 0, 0, missing)).int()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
        grid = functional.pad(scales, (0, 0, 0, 0, 0, missing)).transpose(0, 1).contiguous()
        few = len(numbers)
        return lambda rows: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, grid)[:, :few]


def rounds_short(model: nn.Module) -> bool:
    """Tell whether a model has such layers, so that its numbers are rounded to bfloat16 on their way."""
    return any(isinstance(one, FewBits) for one in model.modules())


def _unpacked(numbers: Shaped[Tensor, "o h"]) -> Shaped[Tensor, "o i"]:
    """Return numbers of four bits, one in a byte."""
    return torch.stack([numbers & LEVELS, numbers >> 4], -1).flatten(1)


KINDS: dict[str, type[FewBits]] = {"int8": Int8Linear, "int4": Int4Linear}
