"""Linear layers with weights packed for short passes on a CPU.

Scoring a token tree multiplies matrices by a handful of rows. The kernel that `torch.nn.Linear` calls on a CPU is made
for one row or for many; oneDNN's, with weights packed once, is up to five times as fast in between, which decides how
much dearer a tree is than a single token. Packed weights take as much memory again, so only small models are packed.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from polydraft.models.weights import weight_of

MOST_BYTES = 1 << 30
"""Models with larger weights are left alone; their passes are bound by memory and would gain little."""
SMALL, LARGE = 1 << 16, 1 << 19
"""A matrix of fewer entries is not worth packing; from the second number on even a single row is faster packed."""


class PackedLinear(nn.Linear):
    """A linear layer that shares the parameters of another and also keeps them packed.

    The packed copy is used for inference in float32 on a CPU, without autocast, as long as the weights are those that
    were packed; training them, moving them or changing their precision falls back to the plain layer.
    """

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.training = plain.training
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.packed = _packed(plain.weight)
        self.origin: tuple[int, int] | None = (plain.weight.data_ptr(), plain.weight._version)
        self.mark = weight_of(plain.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias."""
        if torch.compiler.is_compiling():
            return functional.linear(input, self.weight, self.bias)  # the compiler packs weights itself
        rows = input.numel() // self.in_features
        worth_it = rows > 1 or self.weight.numel() >= LARGE
        usable = input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") and self._is_current()
        if not worth_it or torch.is_grad_enabled() or not usable:
            return functional.linear(input, self.weight, self.bias)
        flat = input.reshape(rows, self.in_features)
        return _multiplied(flat, self.packed, self.bias).view(*input.shape[:-1], self.out_features)

    def _is_current(self) -> bool:
        return (self.weight.data_ptr(), self.weight._version) == self.origin

    def __getstate__(self) -> dict[str, object]:
        return {
            **self.__dict__,
            "packed": None,
            "origin": None,
            "mark": None,
        }  # a packed matrix cannot be copied or stored


def check_packed(model: nn.Module) -> None:
    """Let go of packed weights that were changed by way of `weight.data`, which leaves no trace, as PEFT merges do."""
    for one in model.modules():
        if isinstance(one, PackedLinear) and one.origin is not None and one.mark != weight_of(one.weight):
            one.origin = None


def pack_linear_layers(model: nn.Module) -> nn.Module:
    """Replace a model's linear layers by packed ones where that helps; parameters and state stay what they are.

    Does nothing for models over one GiB, off the CPU, in another precision than float32, or where torch has no oneDNN.
    """
    if fits_packed(model):
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and module.weight.numel() > SMALL:
                model.set_submodule(name, PackedLinear(module))
    return model


def fits_packed(model: nn.Module) -> bool:
    """Tell whether the model's linear layers can be packed, and twice the memory is affordable."""
    weights = [one.weight for one in model.modules() if isinstance(one, nn.Linear)]
    fits = sum(weight.numel() * weight.element_size() for weight in weights) <= MOST_BYTES
    return fits and all(map(can_pack, weights))


def can_pack(weight: Tensor) -> bool:
    """Tell whether there are packed products with such a matrix: on a CPU, in single precision, with oneDNN."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def packed_product(
    weight: Float[Tensor, "o i"], bias: Float[Tensor, " o"] | None
) -> Callable[[Float[Tensor, "r i"]], Float[Tensor, "r o"]]:
    """Return rows -> rows @ weight.T + bias, over a packed copy of the matrix."""
    packed = _packed(weight)
    return lambda rows: _multiplied(rows, packed, bias)


def linear_of(weight: Float[Tensor, "o i"]) -> nn.Linear:
    """Return a frozen linear layer without a bias over these rows, packed where that helps."""
    if weight.is_inference():  # a packed layer asks for its matrix's version, which only ordinary tensors have
        with torch.inference_mode(False):
            weight = weight.clone()
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(plain) if can_pack(weight) and weight.numel() > SMALL else plain


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)


def _multiplied(rows: Float[Tensor, "r i"], packed: Tensor, bias: Tensor | None) -> Float[Tensor, "r o"]:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
