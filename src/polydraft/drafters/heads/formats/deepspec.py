"""Writing DSpark's heads as DeepSpec's trainer does: a flat configuration, and copies of the target's ends.

Its one class, `Qwen3DSparkModel`, drafts from every slot of a two-sided block without windows, and counts layers from
0 by what they put out; -1 is the embedding's output. Tensors have the names that `block_tensors` gives.

Source: deepseek-ai/DeepSpec, `deepspec/modeling/dspark`.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from polydraft.drafters.heads.block import BlockHead
from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.paths import Markov, PathTerm
from polydraft.errors import InvalidParameter

ANCHORS = 512
"""Blocks per text, of the authors' training: their class asks for the number and drafts without it."""


def deepspec_config(
    drafter: HeadDrafter[BlockHead],
    sizes: Mapping[str, Any],
    terms: Mapping[str, Any],
    tables: Mapping[str, Tensor],
    depth: int,
) -> dict[str, Any]:
    """Return the configuration of a head in DeepSpec's form.

    Args:
        drafter: the head.
        sizes: of its layers, under Hugging Face's names.
        terms: what is said of its Markov term and its confidence head.
        tables: all tensors by name, embeddings and output rows among them.
        depth: how many layers the target has.

    Raises:
        InvalidParameter: the form has no such head; what it lacks is named.
    """
    lacking = next((what for what, there in _beyond(drafter, tables).items() if there), None)
    if lacking is not None:
        raise InvalidParameter(f"DeepSpec has no form for heads with {lacking}; leave out deepspec=True.")
    shape = drafter.network.shape
    return {
        "architectures": ["Qwen3DSparkModel"],
        **sizes,
        "layer_types": ["full_attention"] * shape.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "vocab_size": len(tables["lm_head.weight"]),
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "target_layer_ids": [one - 1 for one in _reads(drafter)],
        "block_size": shape.block,
        "mask_token_id": shape.mask_id,
        "num_anchors": ANCHORS,
        "markov_rank": 0,
        **terms,
    }


def _reads(drafter: HeadDrafter[BlockHead]) -> list[int]:
    return [one for one in drafter.network.shape.reads if one != "final"]


def _beyond(drafter: HeadDrafter[BlockHead], tables: Mapping[str, Tensor]) -> dict[str, bool]:
    """Tell what of a head DeepSpec's class cannot say."""
    head, ends, shape = drafter.network, drafter.ends, drafter.network.shape
    own, path = shape.anatomy, head.path
    plain = isinstance(path, Markov) or type(path) is PathTerm
    beside = 0 if head.confidence is None else head.confidence.in_features - own.width
    ids = [tables["embed_tokens.weight"], tables["lm_head.weight"]]
    counts = {*map(len, ids)} | {one for one in (path.known, path.rows) if one is not None}
    return {
        f"the path term {type(path).__name__}": not plain,
        "convolutions over slots": shape.taps > 0,
        "a mask embedding of their own": shape.mask_id is None,
        "fewer tokens than their target": ends.tokens is not None,
        "tables of different numbers of tokens": len(counts) > 1,
        "slots that draft their own place": not shape.shifted,
        "causal layers": any(shape.causal or ()),
        "windows": any(one is not None for one in shape.windows or ()),
        "the target's last hidden states to read": "final" in shape.reads,
        "layers to read that do not rise": any(one >= other for one, other in pairwise(_reads(drafter))),
        "another width than their target's": shape.target_width != own.width,
        "a factor or a cap of their logits": ends.multiplier != 1 or ends.softcap is not None,
        "queries and keys without norms": not own.normed,
        "biases in some projections of attention": own.bias != own.output_bias,
        "a confidence head that is told a part of a token's row": beside not in (0, path.told),
    }
