"""Small models of transformers' types, and Hugging Face's own text by them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

NEW = 40
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = [int(one) for one in torch.randint(2, 64, (24,), generator=torch.Generator().manual_seed(3))]
GREEDY: dict[str, Any] = {"temperature": 0.0, "eos_token_id": None}


def built(name: str, settings: Mapping[str, Any], seed: int = 1) -> PreTrainedModel:
    """Return a small random model of a type, in float64, whose next tokens depend on what it reads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(name, **{**SIZES, **settings})
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_config(config, **options).double().eval()
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(3.0 if weights.dim() > 1 else 1.0)
    return model


def theirs(model: PreTrainedModel, prompt: Sequence[int], new: int = NEW) -> list[int]:
    """Return Hugging Face's own greedy text."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[0, len(prompt) :].tolist()
