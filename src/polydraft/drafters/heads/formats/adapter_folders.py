"""Folders of Kangaroo's adapters: a configuration of Llama's with one layer, and the tensors of `AdapterModel`.

    norm.weight                             [d]
    layers.0.input_layernorm.weight         [d]
    layers.0.self_attn.{q,k,v,o}_proj.weight

The authors' folders do not say behind which layer an adapter stands, which is a flag of their commands: 2 unless
another one is named. `exit_layer` is this package's own word for it. Their code turns positions with the base 10,000,
whatever `rope_theta` says, and gives every head width / heads channels.

Source: Equationliu/Kangaroo, `kangaroo/adapter.py` and `kangaroo/kangaroo_model.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.formats.folder_fields import Fields, Shapes, Tensors, classes_of, sizes_of, write_head
from polydraft.drafters.heads.sublayers import Anatomy, Rotation
from polydraft.drafters.itself.adapter import Adapter, AdapterDrafter
from polydraft.errors import CheckpointError
from polydraft.models import LanguageModel, PlainFolder

CLASS = "AdapterModel"
USUAL_EXIT, MOST_EXIT = 2, 4096
LAYER = "layers.0."
NAMES = {
    "norm.weight",
    f"{LAYER}input_layernorm.weight",
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o")),
}
TURN = f"{LAYER}self_attn.rotary_emb.inv_freq"
"""What some versions of torch save of the rotation, which follows from the sizes."""


def is_adapter(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds an adapter."""
    return CLASS in classes_of(config)


def holds_adapter(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds an adapter: there are no others."""
    return {"norm.weight", f"{LAYER}self_attn.q_proj.weight"} <= {*shapes} <= {*NAMES, TURN}


def read_adapter(folder: PlainFolder, target_layers: int | None = None) -> AdapterDrafter:
    """Build the drafter of an adapter.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a setting is not known.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder)
    network = Adapter(_anatomy(fields))
    tensors.drop(TURN)
    tensors.fill(network)
    tensors.check_taken()
    exit_layer = fields.count("exit_layer", USUAL_EXIT, most=MOST_EXIT)
    return AdapterDrafter(network.eval().requires_grad_(False), exit_layer, made_for=fields.made_for())


def _anatomy(fields: Fields) -> Anatomy:
    """Return the sizes of the attention; those of an inner layer, which the authors' folders name, have no tensors."""
    width = fields.count("hidden_size", each=1)
    heads = fields.count("num_attention_heads", each=width)
    groups = fields.count("num_key_value_heads", heads, each=1)
    if width % heads or heads % groups or width // heads % 2:
        raise CheckpointError(
            f"config.json in {fields.name} has {heads} query heads on {groups} key heads in a width of {width}."
        )
    for name, wanted in (("num_hidden_layers", 1), ("head_dim", width // heads)):
        if fields.count(name, wanted) != wanted:
            raise fields.wrong(name, fields.get(name), f"an adapter of these sizes has {wanted}")
    if fields.flag("attention_bias"):
        raise fields.wrong("attention_bias", True, "adapters have no biases")
    if fields.rotation() != Rotation():
        told = fields.get("rope_scaling") or fields.get("rope_parameters") or fields.get("rope_theta")
        raise fields.wrong("its rotation", told, "the authors' code turns with the base 10000, so write that")
    eps = fields.number("rms_norm_eps", 1e-6, above=0)
    return Anatomy(width, width, heads, groups, width // heads, eps=eps)


def write_adapter(
    drafter: AdapterDrafter,
    folder: Path,
    target: LanguageModel,
    *,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write an adapter as a folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    facts = target.facts
    own = {"architectures": [CLASS], "model_type": "llama", "exit_layer": drafter.exit_layer}
    sizes = {**sizes_of(drafter.network.anatomy, 1), "vocab_size": facts.vocab_size, "num_target_layers": facts.layers}
    write_head(folder, {**own, **sizes}, drafter.network.state_dict(), HeadEnds(), target, dtype, card)
