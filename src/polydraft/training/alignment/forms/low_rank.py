"""A draft model that learns by corrections of low rank of its weight matrices, which are folded in at the end.

W + s B A stands for a weight matrix W of r rows and c columns, with B of r rows and k columns and A of k rows and c
columns. B and A alone learn, so gradients and the optimiser's state are of their size, and what comes out is a model
like any other. B begins as zeros, so that the draft begins as it was. s is `SCALE`, and k is `RANK` unless a matrix is
smaller.

Source: LoRA (arXiv 2106.09685, section 4.1); its package, peft, would be needed to load what is not folded in.
"""

import copy
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from polydraft.drafters import ModelDrafter
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, module_of
from polydraft.training.heads.losses.masked_training import write_model

RANK, SCALE = 16, 2.0


class Correction(nn.Module):
    """The product s B A that is added to a weight matrix; `up` is B, `down` is A.

    Args:
        rows: r, the rows of the weight matrix.
        columns: c, its columns.
        rank: k, the rank of the product.
    """

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Float[Tensor, "r c"]) -> Float[Tensor, "r c"]:
        """Return W + s B A."""
        return weight + SCALE * (self.up @ self.down)


def correct(model: PreTrainedModel, rank: int = RANK) -> PreTrainedModel:
    """Add a correction to every weight matrix but tables of rows, let these alone learn, and return the model.

    The model's ends and learned positions are such tables.

    Args:
        model: the model, which is changed.
        rank: k, the rank of the corrections; of a matrix with fewer rows or columns, as many as it has.

    Raises:
        InvalidParameter: it has no such matrices.
    """
    ends = model.get_output_embeddings()
    inner = [one for one in model.modules() if one is not ends and _is_matrix(one)]
    if not inner:
        raise InvalidParameter(f"{type(model).__name__} has no matrices of numbers to correct; take the form tuned.")
    model.requires_grad_(False)
    for one in inner:
        rows, columns = cast(Tensor, one.weight).shape
        parametrize.register_parametrization(one, "weight", Correction(rows, columns, min(rank, rows, columns)))
    return model


def _is_matrix(module: nn.Module) -> bool:
    """Tell whether a module has a weight matrix; GPT-2's, which lie turned over, are no `nn.Linear`."""
    weight = getattr(module, "weight", None)
    plain = isinstance(weight, nn.Parameter) and weight.ndim == 2 and weight.is_floating_point()
    return plain and not isinstance(module, nn.Embedding)


@torch.no_grad()
def folded(model: PreTrainedModel) -> PreTrainedModel:
    """Return a new model whose matrices have their corrections inside.

    A copy would not do: it shares the classes of its parts with what goes on learning, and these are what is changed
    where corrections are taken away.
    """
    weights = {name: value for name, value in model.state_dict().items() if ".parametrizations." not in name}
    for name, one in model.named_modules():
        if parametrize.is_parametrized(one, "weight"):
            weights[f"{name}.weight"] = cast(Tensor, one.weight).detach()
    made = type(model)(copy.deepcopy(model.config))
    cast(nn.Module, made).to(model.dtype)
    made.load_state_dict(weights)
    return made.eval()


def write_corrected(drafter: ModelDrafter, folder: Path, target: HuggingFaceModel, *, card: str = "") -> None:
    """Write the model of a drafter with its corrections inside; arguments and errors as of `write_model`."""
    write_model(folded(cast(PreTrainedModel, module_of(drafter.model))), folder, target, card)
