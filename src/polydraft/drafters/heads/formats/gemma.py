"""The sizes of Gemma 4's layers in DeepSpec's folders, whose configuration is that of the target's text model.

Their layers are the target's global ones: `global_head_dim` channels, positions of which a part turns, and, where
`attention_k_eq_v`, no projection of values.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.drafters.heads.formats.fields import Fields
from polydraft.drafters.heads.layers import Anatomy, Rotation
from polydraft.errors import CheckpointError, shown

ACTIVATION = "gelu_pytorch_tanh"
KIND = "full_attention"
"""Whose positions the layers have, of those that `rope_parameters` lists by kinds of layers."""
POSITIONS: Mapping[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
"""Hugging Face's positions of global layers, where a configuration lists none."""
NOT_READ = ("enable_moe_block", "hidden_size_per_layer_input", "use_double_wide_mlp")
"""Parts of Gemma's models that DeepSpec's heads do not have either."""


def gemma_anatomy(fields: Fields) -> Anatomy:
    """Return the sizes of Gemma 4's global layers.

    Raises:
        CheckpointError: a size is missing, they do not fit each other, or layers have parts that are not read.
    """
    for name in NOT_READ:
        if fields.get(name):
            told = shown(fields.get(name))
            raise CheckpointError(f"config.json in {fields.name} says that {name} is {told}; such layers are not read.")
    if fields.get("hidden_activation", ACTIVATION) != ACTIVATION:
        told = shown(fields.get("hidden_activation"))
        raise CheckpointError(f"config.json in {fields.name} asks for the activation {told}, not {ACTIVATION}.")
    width = fields.count("hidden_size", each=1)
    heads = fields.count("num_attention_heads", each=width)
    groups = fields.count("num_key_value_heads" if own_values(fields) else "num_global_key_value_heads", each=width)
    channels = fields.count("global_head_dim", each=width * heads)
    if heads % groups or channels % 2:
        raise CheckpointError(
            f"config.json in {fields.name} has {heads} query heads of {channels} channels on {groups} key heads."
        )
    bias = bool(fields.get("attention_bias", False))
    return Anatomy(
        width=width,
        inner=fields.count("intermediate_size", each=width),
        heads=heads,
        groups=groups,
        channels=channels,
        eps=fields.number("rms_norm_eps", 1e-6, above=0),
        bias=bias,
        output_bias=bias,
        normed=True,
        rotation=_rotation(fields),
    )


def own_values(fields: Fields) -> bool:
    """Tell whether values have a projection of their own."""
    return not fields.get("attention_k_eq_v", False)


def _rotation(fields: Fields) -> Rotation:
    told = fields.table("rope_parameters").get(KIND) or POSITIONS
    if not isinstance(told, Mapping):
        raise CheckpointError(f"config.json in {fields.name} says that {KIND} is {shown(told)}; it must be a table.")
    own = Fields(fields.name, told)
    theta, kind = own.number("rope_theta", 1e6, above=0), own.get("rope_type", "default")
    if kind == "default":
        return Rotation(theta)
    if kind != "proportional":
        raise CheckpointError(f"config.json in {fields.name} asks for rotary positions of kind {shown(kind)}.")
    factor = own.number("factor", 1.0, above=0)
    part = own.number("partial_rotary_factor", 1.0, above=0)
    return Rotation(theta, "proportional", factor, part=min(part, 1.0))
