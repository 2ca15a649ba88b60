"""MTP modules: those inside a target's own checkpoint, and folders that hold modules alone.

    DeepSeek-V3, GLM-4.5, ...  model.layers.{N+m}.{enorm,hnorm,eh_proj,shared_head.norm}, the layer's tensors beside
    Nemotron-H                 mtp.layers.{i}.{enorm,hnorm,eh_proj} of the first layer, final_layernorm of the last
    Qwen3-Next, Qwen3.5        mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}, mtp.layers.{m}.*
    MiMo                       model.mtp_layers.{m}.{token_layernorm,hidden_layernorm,input_proj,final_layernorm}, ...
    speculators                mtp_layers.{m}. and MiMo's names, but the embedding is joined first

N is the number of the target's layers, and m counts modules from 0. Transformers leaves such tensors out when it loads
a target, so they are read again, and nothing else of the folder is. Layers in a target's checkpoint are of the target's
own class; those in a folder of their own, ours or speculators', are Llama's or Qwen's. Ours has Qwen's names.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds, MadeFor
from polydraft.drafters.heads.formats.folder_fields import (
    DEFAULTS,
    Fields,
    Shapes,
    Tensors,
    draft_tokens,
    sizes_of,
    speculator,
    write_head,
)
from polydraft.drafters.heads.mtp_head import MtpHead, MtpModule
from polydraft.errors import CheckpointError, InvalidParameter, shown
from polydraft.models import (
    LanguageModel,
    PlainFolder,
    TargetLayer,
    linear_of,
    pack_linear_layers,
    plain_config,
    plain_names,
    read_plain,
)

LAYERS = ("llama", "qwen2", "qwen3")
"""Kinds of layers in folders of their own."""
REFUSED: Mapping[str, tuple[str, str]] = {
    "Step": (
        r"model\.(language_model\.)?layers\.\d+\.(transformer|shared_head\.output)\.",
        "their layers see the newest tokens alone, within sliding_window, and turn positions in a way of their own, "
        "and a module here sees the whole text",
    ),
    "MiMo-V2": (
        r"model\.mtp\.layers\.\d+\.",
        "their layers see the newest tokens alone, within sliding_window and with a learnt sink, and a module here "
        "sees the whole text",
    ),
}
"""Families whose modules are known and not read: what their tensors are called, and what is missing.

Sources: vllm-project/vllm, `step3p5_mtp.py` and `mimo_v2_mtp.py`; huggingface/transformers, `step3p7` and
`mimo_v2_flash`.
"""
RENAMED = (
    (".attention.dense.", ".self_attn.o_proj."),
    (".attention.", ".self_attn."),
    (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
)
"""What Bailing's checkpoints call tensors of a layer otherwise than its class does; it is renamed in this order."""
EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj")} | {
    f"experts.{part}": (part,) for part in ("up_proj", "down_proj")
}
"""What transformers keeps all experts of a layer in, one behind the other, and the parts that checkpoints hold."""
INNER = "language_model."
"""What may stand before the names of a text model inside a larger one."""
SCALES = "scale_inv", "scale", ".scales", ".qweight"
"""How tensors' names end in checkpoints with quantised weights."""
STATES = "normed", "raw"
"""What `recycle` and `reads` may say: the state behind a last norm, or before it."""
COPIES = "shared_head.head.weight", "embed_tokens.weight"
"""What modules of DeepSeek's kind may hold of their target's ends."""


@dataclass(frozen=True)
class Family:
    """How a family calls its modules' tensors.

    Args:
        promised: what its configuration calls the number of modules.
        root: before all of their tensors.
        block: before the tensors of a module's layer; `{at}` stands for its number.
        names: of the other parts, by `MtpModule`'s names; without a number they are shared by all modules. `{at}` is
            that of a module's first layer, `{end}` that of its last.
        behind: whether modules are counted on from the target's layers.
        hidden_first: whether the hidden state is joined before the embedding.
        chained: where a module is several layers, what the configuration calls the list of their kinds.
    """

    promised: str
    root: str
    block: str
    names: Mapping[str, str]
    behind: bool = False
    hidden_first: bool = False
    chained: str = ""

    def numbers(self, names: Iterable[str], layers: int, length: int = 1) -> list[int]:
        """Return the modules, counted from 0 and each of so many layers, of which there are tensors."""
        signs = [called for called in self.names.values() if "{at}" in called] or [self.block]
        patterns = [re.compile(re.escape(one).replace(re.escape("{at}"), r"(\d+)")) for one in signs]
        first = layers if self.behind else 0
        matches = (pattern.match(name) for name in names for pattern in patterns)
        found = {int(one[1]) for one in matches if one is not None}
        return sorted({(one - first) // length for one in found if one >= first})

    def shared(self) -> list[str]:
        """Return the parts that all modules share."""
        return [part for part, called in self.names.items() if "{" not in called]

    def beginnings(self, modules: int, layers: int) -> tuple[str, ...]:
        """Return how the names of so many modules' tensors begin."""
        if self.behind:
            return tuple(self.block.replace("{at}", str(layers + at)) for at in range(modules))
        return (self.root,)


DEEPSEEK = Family(
    "num_nextn_predict_layers",
    "model.layers.",
    "model.layers.{at}.",
    {
        "enorm": "model.layers.{at}.enorm.",
        "hnorm": "model.layers.{at}.hnorm.",
        "eh_proj": "model.layers.{at}.eh_proj.",
        "norm": "model.layers.{at}.shared_head.norm.",
    },
    behind=True,
)
NEMOTRON = Family(
    "num_nextn_predict_layers",
    "mtp.",
    "mtp.layers.{at}.",
    {
        "enorm": "mtp.layers.{at}.enorm.",
        "hnorm": "mtp.layers.{at}.hnorm.",
        "eh_proj": "mtp.layers.{at}.eh_proj.",
        "norm": "mtp.layers.{end}.final_layernorm.",
    },
    chained="mtp_layers_block_type",
)
QWEN = Family(
    "mtp_num_hidden_layers",
    "mtp.",
    "mtp.layers.{at}.",
    {
        "enorm": "mtp.pre_fc_norm_embedding.",
        "hnorm": "mtp.pre_fc_norm_hidden.",
        "eh_proj": "mtp.fc.",
        "norm": "mtp.norm.",
    },
)
SPECULATORS = Family(
    "num_nextn_predict_layers",
    "mtp_layers.",
    "mtp_layers.{at}.",
    {
        "enorm": "mtp_layers.{at}.token_layernorm.",
        "hnorm": "mtp_layers.{at}.hidden_layernorm.",
        "eh_proj": "mtp_layers.{at}.input_proj.",
        "norm": "mtp_layers.{at}.final_layernorm.",
    },
)
MIMO = replace(
    SPECULATORS,
    root=f"model.{SPECULATORS.root}",
    block=f"model.{SPECULATORS.block}",
    names={part: f"model.{name}" for part, name in SPECULATORS.names.items()},
    hidden_first=True,
)
FAMILIES = (NEMOTRON, QWEN, MIMO, DEEPSEEK)
"""Of targets; layers of Nemotron-H's are called as Qwen's, so it comes first; DeepSeek's as any, so it comes last."""


def is_mtp(config: Mapping[str, Any]) -> bool:
    """Tell by its configuration whether a folder holds MTP modules alone."""
    return config.get("speculators_model_type") == "mtp"


def holds_mtp(shapes: Shapes) -> bool:
    """Tell by its tensors whether a folder holds MTP modules alone."""
    return "mtp.fc.weight" in shapes and all(one.startswith("mtp.") or one in ("d2t", "t2d") for one in shapes)


def read_mtp(folder: PlainFolder, target_layers: int | None = None) -> HeadDrafter[MtpHead]:
    """Build the drafter of modules in a folder of their own.

    Raises:
        CheckpointError: a key is missing or left over, a shape is another one, or the layers are of another kind.
    """
    family, inner = (
        (SPECULATORS, folder.config.get("transformer_layer_config")) if is_mtp(folder.config) else (QWEN, {})
    )
    inner = inner if isinstance(inner, Mapping) else {}
    fields = Fields.of(folder, folder.config, inner, DEFAULTS.get(inner.get("model_type", ""), {}))
    kind = inner.get("model_type", folder.config.get("model_type"))
    if kind not in LAYERS:
        raise fields.wrong("model_type", kind, f"layers of MTP modules in a folder of their own are {_listed(LAYERS)}")
    tensors = Tensors.of(folder, ())
    count = fields.count(family.promised, 1)
    if count > 1 and family is SPECULATORS:
        raise fields.wrong(family.promised, count, "speculators has one module")
    beginning = family.block.replace("{at}", "0")
    told = {
        name: tensors.has(f"{beginning}self_attn.{name}") for name in ("q_norm.weight", "q_proj.bias", "o_proj.bias")
    }
    normed, bias, output_bias = told.values()
    anatomy = replace(fields.anatomy(normed=normed), bias=bias, output_bias=output_bias)
    head = MtpHead.plain(anatomy, count, raw=_raw(fields, "recycle"))
    _share(head, family)
    _fill(head, tensors, family, 0)
    return tensors.drafter(head, HeadEnds(tokens=draft_tokens(tensors)), fields.made_for())


def _raw(fields: Fields, name: str) -> bool:
    """Tell whether a state is meant as it was before its norm."""
    told = fields.get(name, STATES[0])
    if told not in STATES:
        raise fields.wrong(name, told, f"it must be {' or '.join(STATES)}")
    return told == STATES[1]


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"


def _share(head: MtpHead, family: Family) -> None:
    """Let modules share what the family has once."""
    first, *others = cast(list[MtpModule], [*head.steps])
    for name in family.shared():
        for one in others:
            setattr(one, name, getattr(first, name))


def _fill(head: MtpHead, tensors: Tensors, family: Family, first: int) -> None:
    """Put the tensors of all modules into them."""
    at = first
    for place, one in enumerate(cast(list[MtpModule], [*head.steps])):
        layers = [*one.block.layers] if isinstance(one.block, TargetLayer) else [one.block]
        for part, called in family.names.items():
            if not place or part not in family.shared():
                named = called.replace("{at}", str(at)).replace("{end}", str(at + len(layers) - 1))
                tensors.fill(getattr(one, part), named)
        for number, layer in enumerate(layers):
            _fill_layer(layer, tensors, family.block.replace("{at}", str(at + number)))
        at += len(layers)


def _fill_layer(layer: nn.Module, tensors: Tensors, beginning: str) -> None:
    """Put a layer's tensors into it, its experts' one by one where the folder has them so."""
    for name, value in layer.state_dict().items():
        called = beginning + name
        parts = next((parts for held, parts in EXPERTS.items() if called.endswith(f".{held}")), ())
        if not parts or tensors.has(called):
            tensors.put(called, value)
        else:
            _fill_experts(value, tensors, called.rpartition(".")[0], parts)


def _fill_experts(values: Tensor, tensors: Tensors, beginning: str, parts: Sequence[str]) -> None:
    """Put the projections of all experts of a layer into one tensor; those of gates come before those of inputs."""
    pattern = re.compile(rf"{re.escape(beginning)}\.(\d+)\.{parts[0]}\.weight")
    found = {int(one[1]) for one in map(pattern.fullmatch, tensors.left) if one is not None}
    absent = sorted({*range(max(len(values), max(found, default=-1) + 1))} - found)
    if absent:
        raise tensors.incomplete(
            f"{beginning}.{absent[0]}.{parts[0]}.weight is missing, and it has {len(found)} of {len(values)} experts"
        )
    for number, own in enumerate(values):
        for part, place in zip(parts, own.chunk(len(parts)), strict=True):
            tensors.put(f"{beginning}.{number}.{part}.weight", place)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _family(names: Iterable[str], layers: int) -> Family | None:
    """Return the family of the modules among a target's tensors; None if there are none that are read."""
    names = [name.removeprefix(INNER) for name in names]
    refused = any(re.match(pattern, name) for pattern, _ in REFUSED.values() for name in names)
    return None if refused else next((one for one in FAMILIES if one.numbers(names, layers)), None)


def has_modules(target: nn.Module) -> bool:
    """Tell whether MTP modules that are read lie where a target came from; no for what cannot be looked at."""
    model: Any = target
    told = getattr(model, "_keys_to_ignore_on_load_unexpected", None)  # transformers' own list of what it leaves out
    if not told and not any(_promised(vars(model.config), one.promised) for one in FAMILIES):
        return False
    try:
        source, _ = plain_config(model.name_or_path)
        return _family(plain_names(source), model.config.get_text_config().num_hidden_layers) is not None
    except CheckpointError:
        return False


def load_modules(
    target: nn.Module, dtype: torch.dtype, *, recycle: str | None = None, reads: str | None = None
) -> HeadDrafter[MtpHead]:
    """Load the MTP modules in a target's own checkpoint.

    Copies of the target's ends that differ from these are taken, with a warning.

    Args:
        target: a model that was loaded from a folder or from the hub.
        dtype: the precision to run them in.
        recycle: what a module hands on: "normed" for the state behind its last norm, "raw" for that before it; None for
            what the target's configuration says by `mtp_recycle`, or else the former.
        reads: likewise, which of the target's last states the first module reads (`mtp_reads`).

    Raises:
        CheckpointError: there are none, or they are damaged, quantised, of a family that is not read, or states are
            asked for by another word.
        UnsupportedModel: the target's layers cannot be made anew.
    """
    model: Any = target
    if not getattr(model, "name_or_path", ""):
        raise CheckpointError("The target was not loaded from a folder, so there are no MTP modules to read.")
    source, config = plain_config(model.name_or_path)
    names, layers = plain_names(source), model.config.get_text_config().num_hidden_layers
    names = [name.removeprefix(INNER) for name in names]
    for family, (pattern, missing) in REFUSED.items():
        if any(re.match(pattern, one) for one in names):
            raise CheckpointError(f"{source.name} has MTP modules of {family}'s kind, which are not read: {missing}.")
    family = _family(names, layers)
    if family is None:
        raise CheckpointError(_absent(source.name, _text_config(config), layers))
    kinds = _kinds(source.name, getattr(model.config.get_text_config(), family.chained, None), family)
    count = _count(source.name, _text_config(config), family, family.numbers(names, layers, len(kinds or "1")))
    beginnings = family.beginnings(count, layers)
    tensors = Tensors.of(
        read_plain(model.name_or_path, lambda name: name.removeprefix(INNER).startswith(beginnings)), ()
    )
    tensors.left = {name.removeprefix(INNER): one for name, one in tensors.left.items()}
    for theirs, ours in RENAMED:
        tensors.left = {name.replace(theirs, ours): one for name, one in tensors.left.items()}
    rounded = {name for name, one in tensors.left.items() if one.element_size() < 2 or not one.is_floating_point()}
    scaled = next((name for name in tensors.left if name in rounded or name.endswith(SCALES)), None)
    if scaled is not None:
        raise CheckpointError(f"{tensors.folder.name} holds {scaled}: MTP modules with quantised weights are not read.")
    blocks = [TargetLayer(target, dtype, kinds) for _ in range(count)]
    norm: Callable[[], nn.Module] = blocks[0].new_norm
    asked = {name: told for name, told in (("mtp_recycle", recycle), ("mtp_reads", reads)) if told is not None}
    fields = Fields(source.name, asked, (_text_config(config), config))
    order = {"hidden_first": family.hidden_first, "raw": _raw(fields, "mtp_recycle")}
    made = [MtpModule(blocks[0].width, one, norm, **order) for one in blocks]
    state = layers if _raw(fields, "mtp_reads") else "final"
    head = MtpHead(made, blocks[0].width, ((1, 1), (1, 1)), reads=state).to(model.device)
    for one in made:
        one.eh_proj.to(dtype)
    _share(head, family)
    ends = _ends(model, tensors, family.beginnings(count, layers) if family.behind else (), dtype)
    _fill(head, tensors, family, layers if family.behind else 0)
    head.shapes = blocks[0].key_shapes()
    pack_linear_layers(head)
    made_for = MadeFor(model.config.get_text_config().vocab_size, layers)
    return tensors.drafter(head, ends, made_for)


def _promised(config: Mapping[str, Any], word: str) -> int:
    said = config.get(word)
    return said if isinstance(said, int) else 0


def _absent(name: str, config: Mapping[str, Any], layers: int) -> str:
    """Return what is said of a target without modules."""
    for word in dict.fromkeys(one.promised for one in FAMILIES):
        said = _promised(config, word)
        if said:
            blocks = (
                one.block.replace("{at}", str(layers if one.behind else 0)) for one in FAMILIES if one.promised == word
            )
            return (
                f"config.json in {name} says that {word} is {said}, but no tensor of its weights begins with "
                f"{' or '.join(blocks)}: whoever converted it left its MTP modules out."
            )
    return f"{name} has no MTP modules; name a draft model, a head or a drafter."


def _count(name: str, config: Mapping[str, Any], family: Family, numbers: list[int]) -> int:
    """Return how many modules there are.

    Raises:
        CheckpointError: they are others than the configuration says, or one is missing between them.
    """
    if numbers != [*range(len(numbers))]:
        raise CheckpointError(f"{name} has the MTP modules {numbers}, counted from 0: some between them are missing.")
    if family.promised in config and _promised(config, family.promised) != len(numbers):
        raise CheckpointError(
            f"config.json in {name} says that {family.promised} is {shown(config[family.promised])}, but its weights "
            f"hold {len(numbers)} MTP modules."
        )
    return len(numbers)


def _kinds(name: str, told: Sequence[str] | None, family: Family) -> Sequence[str] | None:
    """Return the kinds of a module's layers, where it has several.

    Raises:
        CheckpointError: not just one has attention, or one is of a kind that is not known.
    """
    if told is not None and ([*told].count("full_attention") != 1 or {*told} - {"full_attention", "moe", "mlp"}):
        raise CheckpointError(
            f"config.json in {name} says that {family.chained} is {shown([*told])}; a module that is read has "
            "full_attention once, and otherwise moe or mlp."
        )
    return told


def _ends(target: Any, tensors: Tensors, blocks: tuple[str, ...], dtype: torch.dtype) -> HeadEnds:
    """Return the ends that modules have of their own: copies of the target's, in their blocks, that differ from it."""
    found: list[Tensor | None] = []
    for copied, table in zip(COPIES, (target.get_output_embeddings(), target.get_input_embeddings()), strict=True):
        copies = [tensors.take(block + copied) for block in blocks if tensors.has(block + copied)]
        if not all(torch.equal(one, copies[0]) for one in copies):
            raise tensors.damaged(f"the modules' {copied} differ from each other")
        own = next((one for one in copies if not _same(one, table.weight)), None)
        if own is not None:
            warnings.warn(
                f"The MTP modules of {tensors.folder.name} draft with {copied} of their own, not with the target's.",
                stacklevel=4,
            )
        found.append(own)
    rows, embeddings = (None if one is None else one.to(target.device, dtype) for one in found)
    return HeadEnds(
        None if embeddings is None else nn.Embedding.from_pretrained(embeddings),
        None if rows is None else linear_of(rows),
    )


def _same(copied: Tensor, table: Tensor) -> bool:
    return copied.shape == table.shape and torch.equal(copied.to(table.device, table.dtype), table)


def write_mtp(
    drafter: HeadDrafter[MtpHead],
    folder: Path,
    target: LanguageModel,
    *,
    speculators: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write one module as a folder of its own.

    Args:
        speculators: write the form of vllm-project/speculators, which drafts all tokens of a target.

    Raises:
        InvalidParameter: the form has no such head.
        CheckpointError: it cannot be written.
    """
    head, ends = drafter.network, drafter.ends
    if head.anatomy is None or head.depth > 1 or ends.lm_head is not None or ends.embed_tokens is not None:
        raise InvalidParameter("A folder of its own holds one MTP module with Llama's or Qwen's layer and no ends.")
    if speculators and ends.tokens is not None:
        raise InvalidParameter(f"speculators' form has all tokens of a target, and the head {len(ends.tokens)}.")
    family, own = SPECULATORS if speculators else QWEN, head.anatomy
    (module,) = cast(list[MtpModule], [*head.steps])
    tensors = {
        called.replace("{at}", "0") + "weight": cast(Tensor, getattr(module, part).weight)
        for part, called in family.names.items()
    }
    block = family.block.replace("{at}", "0")
    tensors |= {block + name: value for name, value in module.block.state_dict().items()}
    sizes = sizes_of(own, 1) | {"model_type": "qwen3" if own.normed else "llama"}
    sizes |= {"attention_bias": own.output_bias, "qkv_bias": own.bias, "vocab_size": target.facts.vocab_size}
    recycled = {"recycle": STATES[1]} if module.raw else {}
    config: dict[str, Any] = {"architectures": ["MtpModules"], **sizes, family.promised: 1, **recycled}
    if speculators:
        table = {"transformer_layer_config": sizes, family.promised: 1, **recycled}
        config = {**speculator("mtp", "MTPDraftModel", speculative_tokens=3, verifier_accept_k=1), **table}
    write_head(folder, config, tensors, ends, target, dtype, card)
