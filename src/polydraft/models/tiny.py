"""Tiny random models: of Llama's kind, whose laws can be enumerated, and of every causal type of transformers'."""

import copy
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from jaxtyping import Int
from torch import Generator, Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from polydraft.errors import InvalidParameter
from polydraft.probs import Noise

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, WORDS, LAYERS, LENGTH, WINDOW = 32, 48, 4, 2, 8, 64, 4, 512, 16

_NAMES: list[tuple[Any, str]] = [
    (
        HIDDEN,
        """hidden_size n_embd d_model dim embed_dim embedding_size projection_dim word_embed_proj_dim
        text_hidden_size out_hidden_size mamba_d_ssm lru_width dim_model index_n_heads""",
    ),
    (
        INNER,
        """intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim
        dense_intermediate_size intermediate_size_mlp expert_ffn_hidden_size dim_ff ffn_size""",
    ),
    (
        HEADS,
        """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        linear_num_value_heads linear_num_heads num_encoder_attention_heads num_decoder_attention_heads
        mamba_n_heads mamba_num_heads n_mamba_heads swa_num_attention_heads num_swa_attention_heads
        n_routed_experts num_experts num_local_experts moe_num_experts adapter_rank laurel_rank
        num_routed_experts depth""",
    ),
    (
        KEY_HEADS,
        """num_key_value_heads num_kv_heads multi_query_group_num linear_num_key_heads num_swa_key_value_heads
        swa_num_key_value_heads num_experts_per_tok moe_topk top_k_experts num_experts_per_token moe_top_k
        num_selected_experts moe_k""",
    ),
    (
        HEAD,
        """head_dim attention_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim v_head_dim
        qk_rope_head_dim qk_nope_head_dim mamba_d_state state_size ssm_state_size mamba_d_head
        mamba_head_dim mamba_headdim index_head_dim swa_head_dim kv_channels global_head_dim
        swa_v_head_dim chunk_size mamba_chunk_size rotary_dim hidden_size_per_layer_input""",
    ),
    (
        LAYERS,
        """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers""",
    ),
    (WORDS, "vocab_size vocab_size_per_layer_input text_vocab_size"),
    (
        LENGTH,
        """max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length
        max_target_positions max_source_positions context_length""",
    ),
    (
        WINDOW,
        """sliding_window attention_chunk_size local_attention window_size attention_window_size q_lora_rank
        kv_lora_rank moe_intermediate_size moe_ffn_hidden_size shared_expert_intermediate_size
        moe_shared_expert_intermediate_size shared_intermediate_size index_topk expert_intermediate_size""",
    ),
    (
        1,
        """n_group num_group topk_group n_shared_experts num_shared_experts first_k_dense_replace mamba_n_groups
        mamba_ngroups n_groups moe_num_shared_experts num_mem_blocks zero_expert_num bos_token_id""",
    ),
    (28, "image_size"),
    (14, "patch_size"),
    (None, "eos_token_id forced_eos_token_id forced_bos_token_id"),
    (0, "pad_token_id"),
    (True, "is_decoder"),
]
SIZES: dict[str, Any] = {name: value for value, names in _NAMES for name in names.split()}
"""What a setting of this name becomes, wherever it stands."""
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")
"""Settings with a kind for every layer."""
_TURNS = ["linear_attention", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_experts": 16},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": HEADS},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "altup_num_inputs": 2,
        "intermediate_size": [INNER] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": _TURNS, "mamba_n_heads": 8},
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": HEAD},
    "nemotron": {"num_key_value_heads": KEY_HEADS},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 8, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs beside or instead; of parts by their names."""
SINGLE = ("inkling2_text", "xglm", "xlnet")
"""Types that transformers cannot run in double precision."""


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


DEVIATION = 0.6
"""Standard deviation of the weights: large enough that next-token laws are far from uniform."""


def tiny_target(seed: int = 0, vocabulary: int = 8, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Return a random Llama model of two layers over a small vocabulary; the same arguments give the same weights.

    It has no end-of-text token, so it always gives as many tokens as asked for. torch's global random state is left
    as it was.

    Raises:
        InvalidParameter: a vocabulary of fewer than two tokens.
    """
    if vocabulary < 2:
        raise InvalidParameter(f"vocabulary must be at least 2, but is {vocabulary}.")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    weights, _ = Noise.from_seed(seed, 2).generators
    return _shaken(model, DEVIATION, weights, keep=0.0, dtype=dtype)


def tiny_draft(target: PreTrainedModel, distance: float = 0.05, seed: int = 0) -> PreTrainedModel:
    """Return a copy of a tiny target with noise of standard deviation `distance` on its weights: a draft model.

    At .02, .05 and .1 its next-token laws overlap the target's by about nine, seven and six tenths.
    """
    _, noise = Noise.from_seed(seed, 2).generators  # another stream than the target's own weights came from
    return _shaken(copy.deepcopy(target).double(), distance, noise, keep=1.0, dtype=target.dtype)


@torch.no_grad()
def _shaken(
    model: PreTrainedModel, spread: float, stream: Generator, keep: float, dtype: torch.dtype
) -> PreTrainedModel:
    """Scale all weight matrices by `keep` and add noise; the normalisations' gains stay."""
    for weights in model.parameters():
        if weights.dim() > 1:
            weights.copy_(keep * weights + spread * torch.randn(weights.shape, generator=stream))
    nn.Module.to(model, dtype)  # transformers hides the signature of its own
    return model.eval()
