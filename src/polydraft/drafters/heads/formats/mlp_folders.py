"""Folders of MLP speculators, as foundation-model-stack writes them and vLLM reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.ends import HeadEnds
from polydraft.drafters.heads.formats.folder_fields import Fields, Shapes, Tensors
from polydraft.drafters.heads.mlp_speculator import MlpSpeculator
from polydraft.errors import CheckpointError, shown
from polydraft.models import LanguageModel, PlainFolder, write_plain

MOST_STAGES = 16
NAMES = {"emb.weight": "emb", "proj.weight": "proj", "ln.weight": "ln", "shift": "ln", "head.weight": "head"}
"""Which list of the folder holds a parameter of a stage; `shift` is its norm's bias."""


def is_mlp(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds an MLP speculator."""
    return config.get("model_type") == "mlp_speculator"


def holds_mlp(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds an MLP speculator."""
    return any(f"{prefix}emb.0.weight" in shapes and f"{prefix}ln.0.bias" in shapes for prefix in ("speculator.", ""))


def read_mlp(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[MlpSpeculator]:
    """Build the drafter of an MLP speculator; `target_layers` does not matter here.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a value is no number.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder, ("speculator.",))
    (vocab, inner), (_, width) = tensors.matrix("emb.0.weight"), tensors.matrix("proj.0.weight")
    if not min(vocab, inner, width):
        raise CheckpointError(f"The head in {folder.name} is damaged: a table of it is empty.")
    tied, shared = _flag(fields, "tie_weights"), dict[str, torch.Tensor]()
    depths = fields.count("n_predict", 1, most=MOST_STAGES, each=0 if tied else 2 * vocab * inner)
    network = MlpSpeculator(width, inner, vocab, depths, scaled=_flag(fields, "scale_input"))
    for depth in range(depths):
        stage, names = network.stage(depth), {own: _named(own, depth) for own in NAMES}
        for own, name in names.items() if tied else ():
            kept = shared.get(own) if depth > (own == "proj.weight") else None
            if kept is not None and not tensors.has(name):
                tensors.left[name] = kept
            shared[own] = tensors.left.get(name, stage.get_parameter(own))
        tensors.fill(stage, rename=names)
    tensors.done()
    return HeadDrafter(network.eval().requires_grad_(False), HeadEnds(), made_for=fields.made_for())


def write_mlp(drafter: HeadDrafter[MlpSpeculator], folder: Path, target: LanguageModel, *, card: str = "") -> None:
    """Write an MLP speculator as a folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    network = drafter.network
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "tie_weights": False}
    config |= {"emb_dim": network.width, "inner_dim": network.inner, "n_predict": len(network.stages)}
    config |= {"vocab_size": target.facts.vocab_size, "scale_input": network.scaled}
    tensors = {
        f"speculator.{_named(own, depth)}": network.stage(depth).get_parameter(own).to(torch.bfloat16)
        for depth in range(len(network.stages))
        for own in NAMES
    }
    write_plain(folder, config, tensors, card)


def _flag(fields: Fields, name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config.json in {fields.name} says that {name} is {shown(value)}; it must be true or false."
        )
    return value


def _named(own: str, depth: int) -> str:
    return f"{NAMES[own]}.{depth}.{'bias' if own == 'shift' else 'weight'}"
