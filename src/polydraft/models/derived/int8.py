"""A model with weights of eight bits: a quarter of the memory to read, which is what a short pass on a CPU waits for.

Each row of a matrix is rounded to 255 steps of its own largest entry; what goes in and comes out stays as it is. So the
copy's law is close to the model's (an overlap of 0.97 for SmolLM2-135M), which makes it a draft model, not a target.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from polydraft.errors import UnsupportedModel
from polydraft.models.checks.evaluation import is_offloaded
from polydraft.models.derived.copying import sharing_copy

STEPS = 127
MOST_ROWS = 64
"""Of more rows than this the kernel is slower than a product with unpacked weights."""
BLOCK = 16
"""The kernel reads so many columns at a time, beyond the end of a row if it must."""


class Int8Linear(nn.Linear):
    """A linear layer with weights of eight bits, a scale for each row of them.

    Layers around it, such as adapters, may look at its `weight`: that is the matrix that the eight bits stand for.
    """

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.training = plain.training
        self.in_features, self.out_features = plain.in_features, plain.out_features
        steps, scales = rounded(plain.weight.detach())
        self.precision = plain.weight.dtype
        self.steps = nn.Parameter(steps, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = plain.bias

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  there is no such parameter
        """The matrix, in the precision that it had."""
        return (self.steps * self.scales.unsqueeze(1)).to(self.precision)

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ (scales * steps).T + bias."""
        rows = input.reshape(-1, self.in_features)
        return int8_product(self.steps, self.scales, self.bias)(rows).view(*input.shape[:-1], self.out_features)


def rounded(weight: Float[Tensor, "o i"]) -> tuple[Int[Tensor, "o i"], Float[Tensor, " o"]]:
    """Return the nearest multiples of each row's step, and the steps in single precision, which no step falls below."""
    whole = weight.float()
    scales = (whole.abs().amax(dim=1) / STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    return (whole / scales.unsqueeze(1)).round().clamp(-STEPS, STEPS).to(torch.int8), scales


def int8_product(
    weight: Int[Tensor, "o i"], scales: Float[Tensor, " o"], bias: Float[Tensor, " o"] | None
) -> Callable[[Float[Tensor, "r i"]], Float[Tensor, "r o"]]:
    """Return rows -> rows @ (scales * weight).T + bias; a few rows are multiplied in bfloat16."""
    short, whole = scales.to(torch.bfloat16), weight.shape[1] % BLOCK == 0

    def product(rows: Float[Tensor, "r i"]) -> Float[Tensor, "r o"]:
        if len(rows) > MOST_ROWS or not whole:
            return functional.linear(rows, (weight * scales.unsqueeze(1)).to(rows.dtype), bias)
        out = torch.ops.aten._weight_int8pack_mm(rows.to(torch.bfloat16), weight, short).to(rows.dtype)
        return out if bias is None else out + bias

    return product


@torch.inference_mode(False)
@torch.no_grad()
def in_int8(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with weights of eight bits in all linear layers, the head included; the rest is shared.

    Raises:
        UnsupportedModel: the model is not on a CPU, for which the kernel is made, or its weights are elsewhere between
            passes, or its layers are of other kinds.
    """
    head = model.get_output_embeddings()
    if not any(isinstance(one, nn.Linear) and one is not head for one in model.modules()):
        raise UnsupportedModel(f"{type(model).__name__} has no linear layers of torch's that could have eight bits.")
    if is_offloaded(model):
        raise UnsupportedModel(
            f"Weights of this {type(model).__name__} are offloaded, so none of eight bits can be made; take another "
            "drafter, or load the model on one device."
        )
    if model.device.type != "cpu":
        raise UnsupportedModel(f"A draft of eight bits is made for CPUs, but the model is on {model.device}.")
    made = sharing_copy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, Int8Linear):
            made.set_submodule(name, Int8Linear(module))
    return made
