"""Muon: momentum with orthogonalised updates for weight matrices, AdamW for tables and everything else.

torch.optim.Muon orthogonalises in bfloat16, which is some forty times slower than float32 on a CPU without bfloat16
instructions and would take longer than the training itself; this one uses bfloat16 only where the machine multiplies it
in hardware, and treats all matrices of a shape in one batched product.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

QUINTIC = (3.4445, -4.7750, 2.0315)


def has_fast_bfloat16() -> bool:
    """Tell whether this machine multiplies bfloat16 matrices in hardware (emulation is forty times slower)."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()


def orthogonalised(matrices: Float[Tensor, "m r c"], rounds: int = 5) -> Float[Tensor, "m r c"]:
    """Move the singular values of each matrix to about one, by Newton-Schulz iterations.

    X <- a X + (b A + c A A) X with A = X X^T, starting from X / ||X||_F (arXiv 2502.16982, equations 1 and 2). The
    products keep the precision of the matrices.
    """
    a, b, c = QUINTIC
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if matrices.shape[-2] <= matrices.shape[-1] else x.mT


class Muon(Optimizer):
    """Optimise hidden matrices by Muon and embeddings, output rows, norms and biases by AdamW.

    Args:
        model: the model; matrices inside its layers are Muon's, but for output rows, which are called `lm_head`.
        matrix_rate: learning rate of the matrices; their updates have root-mean-square entry about 0.2 of it.
        other_rate: learning rate of all other parameters.
        weight_decay: decoupled weight decay of the matrices.
        slow: parameters that AdamW moves at a quarter of `other_rate`, matrices too.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_rate: float,
        other_rate: float,
        weight_decay: float = 0.1,
        slow: Sequence[nn.Parameter] = (),
    ) -> None:
        tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        tables |= {id(one) for name, one in model.named_parameters() if f".{name}".endswith(".lm_head.weight")}
        own = {id(one) for one in slow}
        usual = [one for one in model.parameters() if id(one) not in own]
        matrices = [one for one in usual if one.ndim == 2 and id(one) not in tables]
        others = [one for one in usual if one.ndim != 2 or id(one) in tables]
        groups = [
            {"params": matrices, "lr": matrix_rate, "orthogonal": True, "decay": weight_decay},
            {"params": others, "lr": other_rate, "orthogonal": False, "decay": 0.0},
        ]
        if slow:
            groups.append({"params": [*slow], "lr": other_rate / 4, "orthogonal": False, "decay": 0.0})
        super().__init__(groups, {})
        self.precision = torch.bfloat16 if has_fast_bfloat16() else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  the base has overloads
        """Update all parameters once."""
        for group in self.param_groups:
            with_gradient = [one for one in group["params"] if one.grad is not None]
            if group["orthogonal"]:
                self._muon(with_gradient, group["lr"], group["decay"])
            else:
                self._adamw(with_gradient, group["lr"])

    def _muon(self, parameters: Iterable[Tensor], rate: float, decay: float, momentum: float = 0.95) -> None:
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            alike[parameter.shape].append(parameter)
        for shape, group in alike.items():
            looked_ahead = []
            for parameter in group:
                gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
                if not state:
                    state["velocity"] = torch.zeros_like(parameter)
                velocity = state["velocity"].lerp_(gradient, 1 - momentum)
                looked_ahead.append(gradient.lerp(velocity, momentum))
            directions = orthogonalised(torch.stack(looked_ahead).to(self.precision))
            updates = directions.to(group[0].dtype) * (0.2 * max(shape) ** 0.5)
            for parameter, update in zip(group, updates, strict=True):
                parameter.mul_(1 - rate * decay).sub_(update, alpha=rate)

    def _adamw(self, parameters: Iterable[Tensor], rate: float, first: float = 0.9, second: float = 0.95) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["step"] += 1
            state["mean"].lerp_(parameter.grad, 1 - first)
            state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
            size = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(1e-8)
            parameter.addcdiv_(state["mean"], size, value=-rate / (1 - first ** state["step"]))
