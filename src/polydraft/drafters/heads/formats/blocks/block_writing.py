"""Writing block heads: the folders of DFlash's and Model-Optimizer's trainers, DeepSpec's, and those of speculators.

The first form holds DSpark's terms and LiLiCorr's as Model-Optimizer does, those of DFlash2 and XPress as their authors
do, and one term that is this package's own.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.blocks.block_reading import backbone_of
from polydraft.drafters.heads.formats.blocks.path_term_folders import (
    LATTICE,
    REFINER,
    lilicorr_settings,
    released_name,
    speculators_xpress,
    xpress_settings,
)
from polydraft.drafters.heads.formats.folder_fields import (
    embeddings_of,
    output_rows_of,
    sizes_of,
    speculator,
    write_head,
)
from polydraft.drafters.heads.lilicorr import LiLiCorr
from polydraft.drafters.heads.paths import Domino, GatedMarkov, Markov, Mixing, PathTerm, RecurrentMarkov, Selector
from polydraft.drafters.heads.xpress import XPress
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, Layer

ANCHORS = 512
"""Blocks per text, of the authors' training: their class asks for the number and drafts without it."""


def write_block(
    drafter: HeadDrafter[BlockHead],
    folder: Path,
    target: LanguageModel,
    *,
    speculators: bool = False,
    deepspec: bool = False,
    target_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write a block head as a folder.

    Args:
        speculators: write the form of vllm-project/speculators, which holds embeddings and output rows as well.
        deepspec: write the form of deepseek-ai/DeepSpec, which does so too and says all in one table.
        target_layers: how many layers the target has.

    Raises:
        InvalidParameter: the form has no such head, what it lacks is named; or two forms are asked for.
        CheckpointError: it cannot be written.
    """
    if speculators and deepspec:
        raise InvalidParameter("A head is written in one form; leave out speculators=True or deepspec=True.")
    if drafter.network.shape.gemma:
        raise InvalidParameter("Block heads with Gemma's layers are read, and not written.")
    head, ends, depth = drafter.network, drafter.ends, target_layers or getattr(target, "layers", None)
    tensors, config = block_tensors(head, ends), _of_speculators(head, ends, target) if speculators else {}
    if speculators or deepspec:
        tensors["embed_tokens.weight"] = embeddings_of(ends, target) * ends.scale
        tensors["lm_head.weight"] = output_rows_of(ends, target)
    if deepspec:
        config = _of_deepspec(head, ends, tensors, depth)
    elif not speculators:
        config = _own(head, ends, target, depth)
        tensors = {_flat(name): value for name, value in tensors.items()}
    folded = ("scale",) if speculators or deepspec else ()
    write_head(folder, config, tensors, ends, target, dtype, card, folded)


def block_tensors(head: BlockHead, ends: HeadEnds) -> dict[str, Tensor]:
    """Return a head's tensors under the names of DeepSpec's folders, and of speculators' for XPress's term."""
    named, path = dict(backbone_of(head).state_dict()), head.path
    kinds = {Markov: "markov_head.", Selector: "candidate_selector.", XPress: REFINER, LiLiCorr: LATTICE}
    prefix = next((prefix for kind, prefix in kinds.items() if isinstance(path, kind)), "")
    named |= {f"{prefix}{name}": value for name, value in path.state_dict().items()}
    if head.confidence is not None:
        named |= {f"confidence_head.proj.{name}": value for name, value in head.confidence.state_dict().items()}
    own = {name: value for name, value in ends.state_dict().items() if name != "tokens"}
    return {**named, **own}


def _flat(name: str) -> str:
    """Return a tensor's name in the first form, which puts DSpark's terms beside the layers."""
    if not name.startswith(("markov_head.", "confidence_head.")):
        return released_name(name)
    return name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj.")


def _sizes(head: BlockHead) -> dict[str, Any]:
    """Return the sizes of the layers, under Hugging Face's names."""
    own = head.shape.anatomy
    return {"model_type": "qwen3", **sizes_of(own, head.shape.layers), "attention_bias": own.bias}


def _windows(head: BlockHead) -> dict[str, Any]:
    """Return the layers' windows; Hugging Face's Qwen3 forgets them where `use_sliding_window` is not set."""
    shape = head.shape
    windows = shape.windows or (None,) * shape.layers
    found = {window for window in windows if window is not None}
    if len(found) > 1:
        raise InvalidParameter(f"Layers with windows of {sorted(found)} positions cannot be written in one folder.")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    window = next(iter(found), None)
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None}


def _own(head: BlockHead, ends: HeadEnds, target: LanguageModel, depth: int | None) -> dict[str, Any]:
    shape, path = head.shape, head.path
    kind: dict[str, Any] = {"projector_type": "dflash"}
    name, beside = "DFlashDraftModel", dict[str, Any]()
    if isinstance(path, Mixing):
        kind = {"projector_type": "mixing", "gru_hidden_dim": path.size, "emb_dim": path.mix[0].out_features}
    elif isinstance(path, Domino):
        inner = path.embed_proj[0].out_features
        kind = {"projector_type": "domino", "gru_hidden_dim": path.size, "emb_dim": inner}
        kind["pure_draft_prefix_len"] = path.plain
    elif isinstance(path, Markov):
        kind = {"projector_type": "dspark", "markov_rank": path.rank, "markov_head_type": _markov_kind(path)}
    elif isinstance(path, Selector):
        kind = {"projector_type": "dflash2", "selector_rank": path.size, "selector_top_k": path.most}
    elif isinstance(path, LiLiCorr):
        if shape.shifted:
            raise InvalidParameter("LiLiCorr's folders hold heads whose slots draft their own places.")
        name, kind = "LiLiCorrDraftModel", {"projector_type": "lilicorr", **lilicorr_settings(path)}
    elif isinstance(path, XPress):
        name, beside = "Qwen3XPressModel", {**xpress_settings(path), "sample_from_anchor": shape.shifted}
    if shape.taps:
        kind |= {"conv_kernel_size": shape.taps, "conv_group_size": shape.group}
    if ends.scale != 1 or ends.multiplier != 1 or ends.softcap is not None:
        kind |= {"input_embedding_scale": ends.scale, "output_multiplier": ends.multiplier}
        kind |= {"final_logit_softcapping": ends.softcap}
    return {
        "architectures": [name],
        **_sizes(head),
        **_windows(head),
        "vocab_size": target.facts.vocab_size,
        "num_target_layers": depth,
        "block_size": shape.block,
        "is_causal": _causal(head),
        **beside,
        **({"emb_dim": kind["emb_dim"]} if "emb_dim" in kind else {}),  # which Domino's readers look for here too
        "dflash_config": {
            "mask_token_id": shape.mask_id,
            "target_layer_ids": [_number(one, depth) - 1 for one in shape.reads],
            "shift_label": shape.shifted,
            "use_confidence_head": head.confidence is not None,
            **kind,
        },
    }


def _number(layer: Layer, depth: int | None) -> int:
    """Return how many layers lie below a hidden state.

    Raises:
        InvalidParameter: it is the last one, and the target's depth is not known.
    """
    if layer != "final":
        return layer
    if depth is None:
        raise InvalidParameter("A head that reads the last hidden states cannot be written without the target's depth.")
    return depth


def _layers(head: BlockHead) -> list[tuple[bool, bool]]:
    """Tell of each layer whether it is causal inside the block, and whether it has a window."""
    shape = head.shape
    causal = shape.causal or (False,) * shape.layers
    windows = shape.windows or (None,) * shape.layers
    return [(one, window is not None) for one, window in zip(causal, windows, strict=True)]


def _causal(head: BlockHead) -> bool | None:
    """Return whether all layers are causal inside the block; None if those with windows are, which needs no word.

    Raises:
        InvalidParameter: others are, and some are not.
    """
    layers = _layers(head)
    causal = {one for one, _ in layers}
    if len(causal) == 1:
        return causal.pop()
    if all(one == window for one, window in layers):
        return None
    raise InvalidParameter(
        "A head of which some layers are causal and some are not can be written only if those with windows are."
    )


def _markov_kind(path: Markov) -> str:
    if isinstance(path, RecurrentMarkov):
        return "rnn"
    return "gated" if isinstance(path, GatedMarkov) else "vanilla"


def _terms(head: BlockHead) -> dict[str, Any]:
    """Tell of the Markov term, and of the confidence head whether it reads the last token's row beside the slot."""
    told: dict[str, Any] = {"enable_confidence_head": head.confidence is not None}
    if isinstance(head.path, Markov):
        told |= {"markov_rank": head.path.rank, "markov_head_type": _markov_kind(head.path)}
    if head.confidence is not None:
        told["confidence_head_with_markov"] = head.confidence.in_features > head.shape.anatomy.width
    return told


def _of_speculators(head: BlockHead, ends: HeadEnds, target: LanguageModel) -> dict[str, Any]:
    lacking = next((what for what, there in _beyond_speculators(head, ends).items() if there), None)
    if lacking is not None:
        raise InvalidParameter(f"speculators has no form for heads with {lacking}; leave out speculators=True.")
    shape, markov = head.shape, isinstance(head.path, Markov)
    kind, name = ("dspark", "DSparkSpeculator") if markov else ("dflash", "DFlashSpeculator")
    kind, name = ("xpress", "XPressSpeculator") if isinstance(head.path, XPress) else (kind, name)
    vocab = target.facts.vocab_size
    return {
        **speculator(kind, name, speculative_tokens=shape.drafts),
        "transformer_layer_config": {**_sizes(head), **_windows(head), "vocab_size": vocab},
        "draft_vocab_size": vocab if ends.tokens is None else len(ends.tokens),
        "block_size": shape.block,
        "aux_hidden_state_layer_ids": [*shape.reads],
        "mask_token_id": shape.mask_id,
        "sliding_window_non_causal": (False, True) in _layers(head),
        "sample_from_anchor": shape.shifted,
        "target_hidden_size": shape.target_width,
        **(_terms(head) if markov else {}),
        **(speculators_xpress(head.path) if isinstance(head.path, XPress) else {}),
    }


def _beyond_speculators(head: BlockHead, ends: HeadEnds) -> dict[str, bool]:
    """Tell what of a head speculators' form cannot say: there layers are causal only by their windows, and all so."""
    layers = _layers(head)
    return {
        f"the path term {type(head.path).__name__}": isinstance(head.path, Domino | Mixing | Selector | LiLiCorr),
        "a gated layer that is no multiple of its rank": isinstance(head.path, XPress)
        and head.path.inner % head.path.rank > 0,
        "convolutions over slots": head.shape.taps > 0,
        "a mask embedding of their own": head.shape.mask_id is None,
        "the target's last hidden states to read": "final" in head.shape.reads,
        "a factor or a cap of their logits": ends.multiplier != 1 or ends.softcap is not None,
        "a confidence head but no Markov term": head.confidence is not None and not isinstance(head.path, Markov),
        "causal layers that have no window": (True, False) in layers,
        "causal and other layers among those with windows": {(True, True), (False, True)} <= {*layers},
    }


def _of_deepspec(head: BlockHead, ends: HeadEnds, tables: dict[str, Tensor], depth: int | None) -> dict[str, Any]:
    if depth is None:
        raise InvalidParameter("DeepSpec's form names the target's depth, which is not known; give target_layers.")
    shape, reads = head.shape, [one for one in head.shape.reads if one != "final"]
    lacking = next((what for what, there in _beyond_deepspec(head, ends, reads, tables).items() if there), None)
    if lacking is not None:
        raise InvalidParameter(f"DeepSpec has no form for heads with {lacking}; leave out deepspec=True.")
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_sizes(head),
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "vocab_size": len(tables["lm_head.weight"]),
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "target_layer_ids": [one - 1 for one in reads],
        "block_size": shape.block,
        "mask_token_id": shape.mask_id,
        "num_anchors": ANCHORS,
        "markov_rank": 0,
        **_terms(head),
    }


def _beyond_deepspec(head: BlockHead, ends: HeadEnds, reads: list[int], tables: dict[str, Tensor]) -> dict[str, bool]:
    """Tell what of a head DeepSpec's class cannot say."""
    shape, own, path = head.shape, head.shape.anatomy, head.path
    plain = isinstance(path, Markov) or type(path) is PathTerm
    beside = 0 if head.confidence is None else head.confidence.in_features - own.width
    counts = {len(tables["embed_tokens.weight"]), len(tables["lm_head.weight"]), path.known, path.rows} - {None}
    return {
        f"the path term {type(path).__name__}": not plain,
        "convolutions over slots": shape.taps > 0,
        "a mask embedding of their own": shape.mask_id is None,
        "fewer tokens than their target": ends.tokens is not None,
        "tables of different numbers of tokens": len(counts) > 1,
        "slots that draft their own place": not shape.shifted,
        "causal layers": any(shape.causal),
        "windows": any(one is not None for one in shape.windows),
        "the target's last hidden states to read": "final" in shape.reads,
        "layers to read that do not rise": any(one >= other for one, other in pairwise(reads)),
        "another width than their target's": shape.target_width != own.width,
        "a factor or a cap of their logits": ends.multiplier != 1 or ends.softcap is not None,
        "queries and keys without norms": not own.normed,
        "biases in some projections of attention": own.bias != own.output_bias,
        "a confidence head that is told a part of a token's row": beside not in (0, path.told),
    }
