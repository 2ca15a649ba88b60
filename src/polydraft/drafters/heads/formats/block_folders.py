"""Writing block heads: this package's folders, which DFlash's readers know but for the path term, and speculators'."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.heads.formats.blocks import block_tensors
from polydraft.drafters.heads.formats.vocabulary import offsets_of
from polydraft.drafters.heads.lattice import BlockDrafter
from polydraft.drafters.heads.paths import (
    Domino,
    GatedMarkov,
    Markov,
    Mixing,
    RecurrentMarkov,
    Selector,
)
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, Layer, write_plain


def write_block(
    drafter: BlockDrafter,
    folder: Path,
    target: LanguageModel,
    *,
    speculators: bool = False,
    target_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write a block head as a folder.

    Args:
        drafter: the head.
        folder: where to.
        target: its target.
        speculators: write the form of vllm-project/speculators, which holds embeddings and output rows as well.
        target_layers: how many layers the target has.
        dtype: the precision of the weights.
        card: the text of its README.md.

    Raises:
        InvalidParameter: speculators has no such head.
        CheckpointError: it cannot be written.
    """
    tensors = block_tensors(drafter.head, drafter.ends)
    tokens = drafter.ends.tokens
    ids = None if tokens is None else drafter.ends.get_buffer("tokens").cpu()
    if speculators:
        config = _of_speculators(drafter, target)
        tensors |= _target_ends(drafter, target)
    else:
        config = _own(drafter, target, target_layers)
    written = {name: value.to(dtype) for name, value in tensors.items()}
    named: dict[str, Tensor] = {} if ids is None else offsets_of(ids, target.vocab_size)
    write_plain(folder, config, {**written, **named}, card)


def _target_ends(drafter: BlockDrafter, target: LanguageModel) -> dict[str, Tensor]:
    """Return the target's embeddings and the head's output rows of it, where the head has none of its own."""
    found: dict[str, Tensor] = {}
    every = torch.arange(target.vocab_size, device=target.device)
    if drafter.ends.embed_tokens is None:
        found["embed_tokens.weight"] = target.embedded(every.unsqueeze(0))[0] * drafter.ends.scale
    if drafter.ends.lm_head is None:
        tokens = every if drafter.ends.tokens is None else drafter.ends.get_buffer("tokens")
        found["lm_head.weight"] = target.output_rows(tokens)
    return found


def _sizes(drafter: BlockDrafter) -> dict[str, Any]:
    """Return the sizes of the layers, under Hugging Face's names."""
    own = drafter.head.shape.anatomy
    turn = own.rotation
    scaling = {
        "": None,
        "linear": {"rope_type": "linear", "factor": turn.factor},
        "llama3": {
            "rope_type": "llama3",
            "factor": turn.factor,
            "low_freq_factor": turn.low,
            "high_freq_factor": turn.high,
            "original_max_position_embeddings": turn.original,
        },
    }[turn.stretch]
    return {
        "model_type": "qwen3",
        "hidden_size": own.width,
        "intermediate_size": own.inner,
        "num_hidden_layers": drafter.head.shape.layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.groups,
        "head_dim": own.channels,
        "hidden_act": "silu",
        "rms_norm_eps": own.eps,
        "attention_bias": own.bias,
        "rope_theta": turn.theta,
        "rope_scaling": scaling,
    }


def _windows(drafter: BlockDrafter) -> dict[str, Any]:
    shape = drafter.head.shape
    windows = shape.windows or (None,) * shape.layers
    found = {window for window in windows if window is not None}
    if len(found) > 1:
        raise InvalidParameter(f"Layers with windows of {sorted(found)} positions cannot be written in one folder.")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"layer_types": kinds, "sliding_window": next(iter(found), None)}


def _own(drafter: BlockDrafter, target: LanguageModel, target_layers: int | None) -> dict[str, Any]:
    shape, path, ends = drafter.head.shape, drafter.head.path, drafter.ends
    kind: dict[str, Any] = {"projector_type": "dflash"}
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
    if shape.taps:
        kind |= {"conv_kernel_size": shape.taps, "conv_group_size": shape.group}
    if ends.scale != 1 or ends.multiplier != 1 or ends.softcap is not None:
        kind |= {"input_embedding_scale": ends.scale, "output_multiplier": ends.multiplier}
        kind |= {"final_logit_softcapping": ends.softcap}
    depth = target_layers or getattr(target, "layers", None)
    return {
        "architectures": ["DFlashDraftModel"],
        **_sizes(drafter),
        **_windows(drafter),
        "vocab_size": target.vocab_size,
        "num_target_layers": depth,
        "block_size": shape.block,
        "is_causal": _causal(drafter),
        "dflash_config": {
            "mask_token_id": shape.mask_id,
            "target_layer_ids": [_number(one, depth) - 1 for one in shape.reads],
            "shift_label": shape.shifted,
            "use_confidence_head": drafter.head.confidence is not None,
            **kind,
        },
    }


def _causal(drafter: BlockDrafter) -> bool:
    """Return whether all layers are causal inside the block.

    Raises:
        InvalidParameter: some are, and some are not.
    """
    causal = set(drafter.head.shape.causal) or {False}
    if len(causal) > 1:
        raise InvalidParameter("A head of which some layers are causal and some are not cannot be written.")
    return causal.pop()


def _markov_kind(path: Markov) -> str:
    if isinstance(path, RecurrentMarkov):
        return "rnn"
    return "gated" if isinstance(path, GatedMarkov) else "vanilla"


def _of_speculators(drafter: BlockDrafter, target: LanguageModel) -> dict[str, Any]:
    shape, path = drafter.head.shape, drafter.head.path
    if isinstance(path, Domino | Mixing | Selector) or "final" in shape.reads or shape.mask_id is None or shape.taps:
        raise InvalidParameter("speculators has no form for such a head; write this package's own.")
    markov = isinstance(path, Markov)
    kind = "dspark" if markov else "dflash"
    tokens = drafter.ends.tokens
    config: dict[str, Any] = {
        "architectures": ["DSparkSpeculator" if markov else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.drafts}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {**_sizes(drafter), **_windows(drafter), "vocab_size": target.vocab_size},
        "draft_vocab_size": target.vocab_size if tokens is None else len(drafter.ends.get_buffer("tokens")),
        "block_size": shape.block,
        "aux_hidden_state_layer_ids": [*shape.reads],
        "mask_token_id": shape.mask_id,
        "sliding_window_non_causal": not _causal(drafter),
        "sample_from_anchor": shape.shifted,
        "target_hidden_size": shape.target_width,
    }
    if markov:
        config |= {"markov_rank": path.rank, "markov_head_type": _markov_kind(path)}
        config |= {"enable_confidence_head": drafter.head.confidence is not None}
    return config


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
