"""Writing EAGLE's heads: the form of their authors, which SGLang and vLLM read too, and that of speculators."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, EagleHead
from polydraft.drafters.heads.formats.eagle_reading import IDS, OLD_NAMES
from polydraft.drafters.heads.formats.folder_fields import offsets_of, sizes_of
from polydraft.errors import InvalidParameter
from polydraft.models import LanguageModel, write_plain


def write_eagle(
    drafter: HeadDrafter[EagleHead],
    folder: Path,
    target: LanguageModel,
    *,
    speculators: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    card: str = "",
) -> None:
    """Write a head of EAGLE-1 or EAGLE-3 as a folder.

    Args:
        drafter: the head.
        folder: where to.
        target: its target.
        speculators: write the form of vllm-project/speculators: `layers.0.` for `midlayer.`, sizes in a table.
        dtype: the precision of the weights.
        card: the text of its README.md.

    Raises:
        InvalidParameter: the form has no such head; one of EAGLE-1 drafts all tokens of its target.
        CheckpointError: it cannot be written.
    """
    head = drafter.network
    if isinstance(head, Eagle3Head):
        config, tensors = _third(drafter, head, target, speculators)
    elif isinstance(head, Eagle1Head):
        if drafter.ends.tokens is not None:
            count = len(drafter.ends.get_buffer("tokens"))
            raise InvalidParameter(f"Folders of EAGLE-1 hold heads of all tokens of a target, and this drafts {count}.")
        config, tensors = _first(drafter, head, target, speculators)
    else:
        raise InvalidParameter(f"There is no form of folders for {type(head).__name__}.")
    written = {name: value.to(dtype) for name, value in tensors.items()}
    tokens = None if drafter.ends.tokens is None else drafter.ends.get_buffer("tokens").cpu()
    named = {} if tokens is None else offsets_of(tokens, target.facts.vocab_size)
    write_plain(folder, config, {**written, **named}, card)


def _third(
    drafter: HeadDrafter[EagleHead], head: Eagle3Head, target: LanguageModel, speculators: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = dict(head.state_dict())
    if speculators or head.depth > 1:
        tensors = {_numbered(name): value for name, value in tensors.items()}
    tensors["lm_head.weight"] = _output_rows(drafter, target)
    if drafter.ends.embed_tokens is not None:
        tensors["embed_tokens.weight"] = drafter.ends.embed_tokens.weight
    sizes = {**_sizes(drafter), "vocab_size": target.facts.vocab_size}
    narrow = head.target_width == head.anatomy.width
    own: dict[str, Any] = {
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "target_hidden_size": None if narrow else head.target_width,
        IDS: [*head.reads],
        "norm_before_residual": head.norms.residual,
        "norm_before_fc": head.norms.joined,
        "fc_norm": head.norms.sources,
        "norm_output": head.norms.output,
    }
    if speculators:
        return {**_speculator("eagle3", "Eagle3Speculator"), "transformer_layer_config": sizes, **own}, tensors
    return {"architectures": ["LlamaForCausalLMEagle3"], **sizes, **own}, tensors


def _numbered(name: str) -> str:
    """Return a tensor's name where all layers are counted."""
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    parts = name.split(".")
    return ".".join(["layers", str(int(parts[1]) + 1), *parts[2:]]) if parts[0] == "layers" else name


def _first(
    drafter: HeadDrafter[EagleHead], head: Eagle1Head, target: LanguageModel, speculators: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, ends = dict(head.state_dict()), drafter.ends
    sizes = {**_sizes(drafter), "vocab_size": target.facts.vocab_size}
    bias = head.fc.bias is not None
    if not speculators:
        if head.normed:
            raise InvalidParameter("Only speculators has a form for EAGLE-1's heads with layer norms.")
        tensors["embed_tokens.weight"] = _embeddings(drafter, target)
        if ends.lm_head is not None:
            tensors["lm_head.weight"] = ends.lm_head.weight
        return {"architectures": ["LlamaForCausalLMEagle"], **sizes, "bias": bias}, tensors
    same = ends.embed_tokens is None or torch.equal(ends.embed_tokens.weight, _embeddings_of(target))
    if head.depth > 1 or not same or ends.lm_head is not None:
        raise InvalidParameter("speculators has a form only for EAGLE-1's heads of one layer with their target's ends.")
    old = {_old_name(name): value for name, value in tensors.items()}
    table = {"transformer_layer_config": sizes, "fusion_bias": bias, "layernorms": head.normed}
    return {**_speculator("eagle", "EagleSpeculator"), **table}, old


def _old_name(name: str) -> str:
    """Return a tensor's name in speculators' form for EAGLE-1."""
    old, new = next(one for one in OLD_NAMES.items() if name.startswith(one[1]))
    return old + name.removeprefix(new)


def _embeddings_of(target: LanguageModel) -> Tensor:
    return target.embedded(torch.arange(target.facts.vocab_size, device=target.facts.device).unsqueeze(0))[0]


def _embeddings(drafter: HeadDrafter[EagleHead], target: LanguageModel) -> Tensor:
    own = drafter.ends.embed_tokens
    return _embeddings_of(target) if own is None else own.weight


def _output_rows(drafter: HeadDrafter[EagleHead], target: LanguageModel) -> Tensor:
    """Return the head's output rows: its own, or those that it has of the target."""
    ends = drafter.ends
    if ends.lm_head is not None:
        return ends.lm_head.weight
    every = torch.arange(target.facts.vocab_size, device=target.facts.device)
    return target.output_rows(every if ends.tokens is None else ends.get_buffer("tokens"))


def _speculator(kind: str, name: str) -> dict[str, Any]:
    """Return what speculators writes of a method and its target."""
    return {
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": "0.7.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def _sizes(drafter: HeadDrafter[EagleHead]) -> dict[str, Any]:
    """Return the sizes of the layers, under Hugging Face's names."""
    own = drafter.network.anatomy
    named = {"model_type": "qwen3" if own.normed else "llama", "attention_bias": own.output_bias, "qkv_bias": own.bias}
    return {**sizes_of(own, drafter.network.depth), **named, "tie_word_embeddings": False}
