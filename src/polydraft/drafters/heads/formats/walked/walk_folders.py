"""Folders of heads that walk: MLP and LSTM speculators, ReDrafter's and Hydra's, as their authors write them.

    IBM's        `model_type` "mlp_speculator"   [speculator.]{emb,proj,head}.{i}.weight, ln.{i}.{weight,bias}
    Snowflake's  the same, with a `method`       {emb,proj}.{i}.0.weight, ln.{i}.0.*, head.{i}.weight ("sum_rnn")
                                                 {forget,input,cell,output}_{emb,proj}.{i}.weight, {cell,state}_ln.{i}.*
    Apple's      "recurrent_drafting_drafter"    rnn_u.*, rnn_w.weight, input_proj.*, lm_head.{j}.linear.*,
                                                 lm_head.{L}.weight
    Hydra's      `hydra_num_heads`               hydra_mlp.{i}.{j}.{linear,res_connection}.*, hydra_lm_head.{i}.*,
                                                 prefix_embeding_layer.* of Hydra++ (so its authors spell it)

Tied stages stand once, or as equal copies. In Hydra++ every second number is that of a dropout.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.folder_fields import (
    Fields,
    Shapes,
    Tensors,
    classes_of,
    output_rows_of,
    sizes_of,
)
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.drafters.heads.walks.hydra import Hydra, HydraHead
from polydraft.drafters.heads.walks.redrafter import RecurrentHead
from polydraft.drafters.heads.walks.speculators import GATES, LstmSpeculator, MlpSpeculator
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, PlainFolder, write_plain

MOST_STAGES = 16
LSTM, RNN = "sum_lstm", "sum_rnn"
ARCTIC: Mapping[str, str] = {
    "ArcticLSTMSpeculatorPreTrainedModel": LSTM,
    "ArcticMLPSpeculatorPreTrainedModel": RNN,
    "MLPVariantSpeculatorPreTrainedModel": RNN,
}
"""Snowflake's classes, and the method of each where none is told."""
HYDRA_FILE = "hydra_lm_head.safetensors"
PLAIN, PREFIX = "mlp", "prefix-mlp"
PREFIX_LAYER = "prefix_embeding_layer."
CHANNELS = 128
"""Of a head of attention in Hydra++'s published folders, which do not tell."""


def is_mlp(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds an MLP or LSTM speculator."""
    return config.get("model_type") == "mlp_speculator"


def holds_mlp(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds an MLP or LSTM speculator."""
    pairs = (
        ("emb.0.weight", "ln.0.bias"),
        ("emb.0.0.weight", "ln.0.0.bias"),
        ("forget_emb.0.weight", "cell_ln.0.bias"),
    )
    return any({prefix + one, prefix + other} <= {*shapes} for prefix in ("speculator.", "") for one, other in pairs)


def _mlp_names(depth: int, *, arctic: bool = False) -> dict[str, str]:
    at = f"{depth}.0" if arctic else str(depth)
    norm = {"ln.norm.weight": f"ln.{at}.weight", "ln.shift": f"ln.{at}.bias"}
    return {
        "emb.weight": f"emb.{at}.weight",
        "proj.weight": f"proj.{at}.weight",
        **norm,
        "lm_head.weight": _head(depth),
    }


def _lstm_names(depth: int, *, shared: bool) -> dict[str, str]:
    names = {f"emb.{gate}.weight": f"{gate}_emb.{depth}.weight" for gate in (GATES[:1] if shared else GATES)}
    names |= {f"proj.{gate}.weight": f"{gate}_proj.{depth}.weight" for gate in GATES}
    for norm in ("cell_ln", "state_ln"):
        names |= {f"{norm}.norm.weight": f"{norm}.{depth}.weight", f"{norm}.shift": f"{norm}.{depth}.bias"}
    return names | {"lm_head.weight": _head(depth)}


def _head(depth: int) -> str:
    return f"head.{depth}.weight"


def read_mlp(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[MlpSpeculator]:
    """Build the drafter of a speculator of IBM's or Snowflake's; the target's depth does not matter here.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a value is no number.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder, ("speculator.",))
    method, tied, scaled = _method(fields), fields.flag("tie_weights"), fields.flag("scale_input")
    shared = method == LSTM and fields.flag("tie_lstm_embs")
    gated = partial(_lstm_names, shared=shared)
    names: Callable[[int], dict[str, str]] = gated if method == LSTM else partial(_mlp_names, arctic=method == RNN)
    first = "forget_" if method == LSTM else ""
    (vocab, inner), (_, width) = (
        tensors.matrix(f"{first}{part}.{'0.0' if method == RNN else '0'}.weight") for part in ("emb", "proj")
    )
    if not min(vocab, inner, width):
        raise tensors.damaged("a table of it is empty")
    if method:
        _check_sizes(fields, inner)
    depths = fields.count("n_predict", 1, most=MOST_STAGES, each=0 if tied else 2 * vocab * inner)
    sizes = {"width": width, "inner": inner, "vocab_size": vocab, "depths": depths, "scaled": scaled}
    network = LstmSpeculator(**sizes, shared=shared) if method == LSTM else MlpSpeculator(**sizes)
    for depth in range(depths) if shared else ():
        if tensors.has(f"forget_emb.{depth}.weight"):
            _drop_copies(tensors, [f"{gate}_emb.{depth}.weight" for gate in GATES], "tie_lstm_embs")
    known = dict[str, Tensor]()
    for depth in range(depths):
        for own, name in names(depth).items() if tied else ():
            kept = known.get(own) if depth > own.startswith("proj.") else None
            if kept is not None and tensors.has(name):
                _check_same(tensors, name, kept, "tie_weights")
            elif kept is not None:
                tensors.left[name] = kept
            known[own] = tensors.left.get(name, network.stage(depth).get_parameter(own))
        tensors.fill(network.stage(depth), rename=names(depth))
    return tensors.drafter(network, HeadEnds(), fields.made_for())


def _method(fields: Fields) -> str:
    """Return which of Snowflake's methods a folder is of; "" for IBM's."""
    named = [ARCTIC[one] for one in classes_of(fields.config) if one in ARCTIC]
    method = fields.get("method", named[0] if named else "")
    if method not in ("", LSTM, RNN):
        raise fields.wrong("method", method, f"it must be {RNN} or {LSTM}")
    return method


def _check_sizes(fields: Fields, inner: int) -> None:
    """Check that the sizes of layers are single numbers, and equal.

    Served and trained, the weight of embeddings follows from `inner_dim` and from `emb_dim`: where these differ, nobody
    can tell what was trained.
    """
    for name in ("inner_dim", "emb_dim", "proj_dim"):
        said = fields.get(name, inner)
        if not str(said).isdecimal():
            raise fields.wrong(name, said, "it must be one number: layers of several sizes are not read")
        if int(said) not in (0, inner):
            raise fields.wrong(name, said, f"its tensors are {inner} wide, and all three sizes must be equal")


def _check_same(tensors: Tensors, name: str, kept: Tensor, why: str) -> None:
    if tensors.left[name].shape != kept.shape or not torch.equal(tensors.left[name].to(kept), kept):
        raise tensors.damaged(f"{name} is another table than the first, and {why} says that they are one")


def _drop_copies(tensors: Tensors, names: list[str], why: str) -> None:
    first, *others = names
    for name in others:
        if tensors.has(name):
            _check_same(tensors, name, tensors.left[first], why)
    tensors.drop(*others)


def write_mlp(
    drafter: HeadDrafter[MlpSpeculator], folder: Path, target: LanguageModel, *, arctic: bool = False, card: str = ""
) -> None:
    """Write a speculator as a folder: IBM's form, or Snowflake's if it has gates or that is asked for.

    Args:
        arctic: write one without gates as Snowflake does, by its method "sum_rnn".

    Raises:
        CheckpointError: it cannot be written.
        InvalidParameter: it drafts fewer tokens than the target has.
    """
    network = drafter.network
    _check_all(drafter, "IBM's and Snowflake's")
    gated = network if isinstance(network, LstmSpeculator) else None
    config: dict[str, Any] = {"model_type": "mlp_speculator", "tie_weights": False, "n_predict": network.depths}
    config |= {"vocab_size": target.facts.vocab_size, "scale_input": network.scaled}
    if gated is None and not arctic:
        config |= {"architectures": ["MLPSpeculatorPreTrainedModel"]}
        config |= {"emb_dim": network.width, "inner_dim": network.inner}
    else:
        method = RNN if gated is None else LSTM
        config |= {"architectures": [next(one for one in ARCTIC if ARCTIC[one] == method)], "method": method}
        config |= dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), str(network.inner))
        config |= {"input_hidden_dim": network.width}
        config |= {} if gated is None else {"tie_lstm_embs": gated.shared}
    names = partial(_lstm_names, shared=gated.shared) if gated else partial(_mlp_names, arctic=arctic)
    tensors = {
        f"speculator.{name}": network.stage(depth).get_parameter(own).to(torch.bfloat16)
        for depth in range(network.depths)
        for own, name in names(depth).items()
    }
    write_plain(folder, config, tensors, card)


def _check_all(drafter: HeadDrafter[Any], whose: str) -> None:
    if drafter.ends.tokens is not None:
        count = len(drafter.ends.tokens)
        raise InvalidParameter(
            f"{whose} form has all of a target's tokens, and the head {count}; take polydraft's (write_walk)."
        )


def is_redrafter(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds a ReDrafter head."""
    return config.get("model_type") == "recurrent_drafting_drafter"


def holds_redrafter(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds a ReDrafter head."""
    return {"rnn_w.weight", "rnn_u.weight"} <= {*shapes}


def _redrafter_names(network: RecurrentHead) -> dict[str, str]:
    layers = len(network.blocks)
    blocks = {
        f"blocks.{layer}.linear.{part}": f"lm_head.{layer}.linear.{part}"
        for layer in range(layers)
        for part in ("weight", "bias")
    }
    return blocks | {"lm_head.weight": f"lm_head.{layers}.weight"}


def read_redrafter(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[RecurrentHead]:
    """Build the drafter of a ReDrafter head; the target's depth does not matter here.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or a value is no number.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder, ("drafter.",))
    recurrent, layers = fields.flag("rnn", True), fields.count("num_draft_layers", 2, least=0, each=1)
    rows, inner = tensors.matrix(f"lm_head.{layers}.weight")
    width = fields.count("hidden_size", inner // 2, each=inner)
    asked = fields.count("exit_dim", 2 * width, each=inner)
    projected = tensors.has("input_proj.weight")
    if projected != (asked != 2 * width):
        has = "an input_proj" if projected else "no input_proj"
        raise fields.wrong("exit_dim", asked, f"a head that is {width} wide and has {has} does not fit that")
    network = RecurrentHead(
        width, layers, rows, asked, recurrent=recurrent, depths=fields.count("num_drafts", 5, most=64)
    )
    tensors.fill(network, rename=_redrafter_names(network))
    return tensors.drafter(network, HeadEnds(), fields.made_for())


def write_redrafter(
    drafter: HeadDrafter[RecurrentHead], folder: Path, target: LanguageModel, *, card: str = ""
) -> None:
    """Write a ReDrafter head as a folder.

    Raises:
        CheckpointError: it cannot be written.
        InvalidParameter: it drafts fewer tokens than the target has.
    """
    network = drafter.network
    _check_all(drafter, "Apple's")
    config = {"model_type": "recurrent_drafting_drafter", "architectures": ["RecurrentDraftingModel"]}
    config |= {"vocab_size": target.facts.vocab_size, "hidden_size": network.width, "exit_dim": network.inner}
    config |= {"num_draft_layers": len(network.blocks), "rnn": network.recurrent, "num_drafts": network.depths}
    names = _redrafter_names(network)
    tensors = {names.get(own, own): value.to(torch.bfloat16) for own, value in network.named_parameters()}
    write_plain(folder, config, tensors, card)


def is_hydra(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds Hydra's heads."""
    return config.get("hydra_num_heads") is not None


def holds_hydra(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds Hydra's heads."""
    return any(name.startswith("hydra_mlp.0.") for name in shapes)


def _hydra_names(network: Hydra, place: int) -> dict[str, str]:
    """Return the names of one head's tensors; blocks behind the second are copies, which are not named."""
    spread = network.prefix is not None
    first, second = (1, 3) if spread else (0, 1)
    names = {
        f"{layer}.{part}": f"hydra_mlp.{place}.{first}.{layer}.{part}"
        for layer in ("linear", "res_connection")
        for part in ("weight", "bias")
    }
    for part in ("weight", "bias"):
        names |= {f"block.linear.{part}": f"hydra_mlp.{place}.{second}.linear.{part}"}
        names |= {f"lm_head.{part}": f"hydra_lm_head.{place}.{'1.' if spread else ''}{part}"}
    return names


def read_hydra(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[Hydra]:
    """Build the drafter of Hydra's heads.

    Args:
        folder: the folder.
        target_layers: how many layers the target has; needed where heads read another state than the last.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, a value is no number, or it is a kind of
            Hydra that is not read.
    """
    fields, tensors = Fields.of(folder, folder.config), Tensors.of(folder, ())
    kind = fields.get("hydra_head_arch", PLAIN)
    if kind not in (PLAIN, PREFIX):
        raise fields.wrong("hydra_head_arch", kind, f"heads of the kinds {PLAIN} and {PREFIX} are read")
    if not fields.flag("grounded_heads", True):
        raise fields.wrong("grounded_heads", False, "heads that do not read the tokens above them are Medusa's")
    first = 1 if kind == PREFIX else 0
    width, joined = tensors.matrix(f"hydra_mlp.0.{first}.linear.weight")
    if joined != 2 * width:
        raise tensors.damaged(f"its first head reads {joined} channels, and heads {width} wide read {2 * width}")
    depths = fields.count("hydra_num_heads", most=MOST_STAGES, each=width)
    layers = fields.count("hydra_num_layers", 1, most=64)
    rows = tensors.matrix(f"hydra_lm_head.0.{'1.' if first else ''}weight")[0]
    anatomy = _prefix_anatomy(fields, tensors, width) if first else None
    network = Hydra(width, depths, layers, rows, anatomy)
    network.reads = (_layer_of(fields, target_layers),)
    tensors.drop(f"{PREFIX_LAYER}embed_tokens.weight", "input_embed_fn.weight")  # tables of the target
    for place in range(depths):
        step = 2 if first else 1
        copies = [f"hydra_mlp.{place}.{first + step * block}.linear" for block in range(1, layers)]
        for part in ("weight", "bias") if copies else ():
            _drop_copies(tensors, [f"{one}.{part}" for one in copies], "Hydra")
        tensors.fill(network.head(place), rename=_hydra_names(network, place))
    if network.prefix is not None and network.norm is not None:
        tensors.fill(network.prefix, f"{PREFIX_LAYER}layers.0.")
        tensors.fill(network.norm, f"{PREFIX_LAYER}norm.")
    return tensors.drafter(network, HeadEnds(), fields.made_for())


def _layer_of(fields: Fields, target_layers: int | None) -> Any:
    """Return which of the target's states heads read."""
    offset = fields.count("hidden_state_offset", 0, least=0)
    if not offset:
        return "final"
    if target_layers is None:
        raise fields.wrong("hidden_state_offset", offset, "the target's layers must be known to count back from")
    if offset > target_layers:
        raise fields.wrong("hidden_state_offset", offset, f"the target has {target_layers} layers")
    return target_layers - offset


def _prefix_anatomy(fields: Fields, tensors: Tensors, width: int) -> Anatomy:
    """Return the sizes of Hydra++'s layer; the authors' folders tell none but by their tensors."""
    name = f"{PREFIX_LAYER}layers.0."
    (queries, _), (keys, _), (inner, _) = (
        tensors.matrix(f"{name}{part}.weight") for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    if not min(queries, keys, inner):
        raise tensors.damaged("a table of it is empty")
    told = fields.get("num_attention_heads")
    if told is None and queries % CHANNELS:
        raise fields.wrong("num_attention_heads", None, f"it must be told where heads are not {CHANNELS} channels wide")
    heads = queries // CHANNELS if told is None else fields.count("num_attention_heads", each=1)
    channels = queries // heads
    if queries % heads or keys % channels:
        raise fields.wrong("num_attention_heads", heads, f"there are {queries} channels of queries and {keys} of keys")
    rotation, eps = fields.rotation(), fields.number("rms_norm_eps", 1e-6, above=0)
    return Anatomy(width, inner, heads, keys // channels, channels, eps, rotation=rotation)


def write_hydra(drafter: HeadDrafter[Hydra], folder: Path, target: LanguageModel, *, card: str = "") -> None:
    """Write Hydra's heads as a folder; heads that share the target's output rows get copies of them.

    Raises:
        CheckpointError: it cannot be written.
        InvalidParameter: they draft fewer tokens than the target has.
    """
    network = drafter.network
    _check_all(drafter, "Hydra's")
    config: dict[str, Any] = {"hydra_head_arch": PREFIX if network.prefix else PLAIN, "grounded_heads": True}
    config |= {"hydra_num_heads": network.depths, "hydra_num_layers": network.layers, "hidden_state_offset": 0}
    config |= {"vocab_size": target.facts.vocab_size}
    tensors = dict[str, Tensor]()
    if network.prefix is not None and network.norm is not None and network.anatomy is not None:
        sizes = sizes_of(network.anatomy, 1)
        config |= {name: sizes[name] for name in ("num_attention_heads", "rms_norm_eps", "rope_theta", "rope_scaling")}
        tensors |= {f"{PREFIX_LAYER}layers.0.{name}": one for name, one in network.prefix.named_parameters()}
        tensors[f"{PREFIX_LAYER}norm.weight"] = network.norm.weight
    rows = None if network.own_rows is not None else output_rows_of(HeadEnds(), target)
    for place in range(network.depths):
        head, names = cast(HydraHead, network.head(place)), _hydra_names(network, place)
        own = dict(head.named_parameters())
        if rows is not None:
            own |= {"lm_head.weight": rows, "lm_head.bias": rows.new_zeros(len(rows))}
        tensors |= {names[name]: value for name, value in own.items()}
        step = 2 if network.prefix is not None else 1
        for block in range(2, network.layers):
            copied = f"hydra_mlp.{place}.{step * block + (step - 1)}.linear."
            tensors |= {copied + part: own[f"block.linear.{part}"] for part in ("weight", "bias")}
    written = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
    write_plain(folder, config, written, card, HYDRA_FILE)


__all__ = [
    "holds_hydra",
    "holds_mlp",
    "holds_redrafter",
    "is_hydra",
    "is_mlp",
    "is_redrafter",
    "read_hydra",
    "read_mlp",
    "read_redrafter",
    "write_hydra",
    "write_mlp",
    "write_redrafter",
]
