"""Tiny random models of every causal type that transformers registers, for checks of what can be decoded, and how."""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from polydraft.models.families.sizes import HEADS, LAYERS, LISTS, OWN, SINGLE, SIZES
from polydraft.probs import Noise

SPREAD = 3.0
"""What weight matrices are multiplied by, so that next tokens depend on what was read."""


def registered_types() -> tuple[str, ...]:
    """Return the types that transformers registers as causal language models, in alphabetical order."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def installed_version() -> str:
    """Return the version of transformers."""
    return transformers.__version__


def tiny_of_type(kind: str, seed: int = 0) -> PreTrainedModel:
    """Return a tiny random model of a registered type, in float64 and evaluation mode.

    Sizes are set by name (`SIZES`), also in parts of a configuration; layers take turns among the kinds that the type
    has. torch's global random state is left as it was.

    Raises:
        Exception: whatever transformers raises for sizes that do not suit the type.
    """
    kinds = CONFIG_MAPPING[kind]
    config: Any = kinds(**sizes_for(kinds(), OWN.get(kind, {})))
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    head = getattr(transformers, found if isinstance(found, str) else found[0])
    if not isinstance(config, head.config_class):  # the head is that of a part, the text's or the decoder's
        config = next((part for part in vars(config).values() if isinstance(part, head.config_class)), config)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(Noise.from_seed(seed, 1).generators[0].get_state())
        model: Any = head._from_config(config, attn_implementation="eager", experts_implementation="eager")
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                    part.weight[part.padding_idx].normal_(std=float(part.weight.std()))  # of zeros all scores are equal
            for weights in model.parameters():
                weights.mul_(SPREAD if weights.dim() > 1 else 1.0)
    return (model if kind in SINGLE else model.double()).eval()


def sizes_for(config: PreTrainedConfig, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that make a configuration tiny, those of its parts among them.

    Args:
        config: the type's usual configuration.
        own: what its type needs beside or instead; of parts by their names.
    """
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found[name] = type(value)(**sizes_for(value, own.get(name, {})))
        elif name in LISTS and isinstance(value, list) and value:
            found[name] = list(islice(cycle(dict.fromkeys(value)), LAYERS))
        elif name in SIZES and value is not None and not isinstance(value, list | dict):
            found[name] = SIZES[name]
    if vars(config).get("kv_lora_rank"):
        found["num_key_value_heads"] = HEADS  # latent attention has as many keys as queries
    return {**found, **{name: value for name, value in own.items() if not isinstance(value, Mapping)}}


def their_greedy_text(
    model: PreTrainedModel, prompts: Int[Tensor, "b t"], mask: Int[Tensor, "b t"], new: int
) -> Tensor:
    """Return Hugging Face's own greedy continuation of prompts, without them."""
    found: Any = model.generate(  # type: ignore[operator]
        prompts, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[:, prompts.shape[1] :]
