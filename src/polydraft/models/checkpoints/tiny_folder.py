"""A tiny model in a folder that engines load: safetensors with a character tokenizer, GGUF, and a Modelfile.

Two Llama layers of width 128 with two heads of 64, as kernels want them, and 32 tokens: end of text, 29 characters, and
"Q" with "QQ", the one merge without which llama.cpp takes no byte-pair vocabulary. The first channel of the residual
stream is constant and only the rows of those three tokens read it, so that they are never likely and every text has as
many tokens as are asked for.
"""

import json
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Generator, Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polydraft.errors import InvalidParameter
from polydraft.extras import GGUF
from polydraft.models.checkpoints.silence import held_back
from polydraft.probs import Noise

END, NEVER, PAIR = "<|endoftext|>", "Q", "QQ"
LETTERS = (*ascii_lowercase, "Ġ", ".", "Ċ")
"""Characters as byte-level vocabularies write them: Ġ is a space, Ċ a new line."""
WORDS = (END, NEVER, PAIR, *LETTERS)
UNLIKELY = 3
"""So many of the first tokens are never likely."""
WIDTH, HEAD, INNER, LAYERS, CONTEXT = 128, 64, 256, 2, 1024
EPSILON, BASE = 1e-5, 10_000.0
SPREAD, DEPTH = 1.3, -60.0
"""The spread of next-token scores, and what the constant channel costs the tokens that are never likely."""
GGUF_FILE, MODELFILE = "tiny.gguf", "Modelfile"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def engine_target(seed: int = 0) -> LlamaForCausalLM:
    """Return the tiny model in single precision; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // HEAD,
        num_key_value_heads=WIDTH // HEAD,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    _fill(model, Noise.from_seed(seed, 1).generators[0])
    return model.eval()


@torch.no_grad()
def _fill(model: LlamaForCausalLM, stream: Generator) -> None:
    """Draw all matrices, and keep the first channel of the residual stream constant."""
    for name, weights in model.named_parameters():
        if weights.dim() < 2:
            continue
        embeds = "embed" in name
        drawn = torch.randn(weights.shape, generator=stream, dtype=torch.float64)
        weights.copy_(drawn if embeds else drawn * SPREAD / weights.shape[1] ** 0.5)
        if embeds:
            weights[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[0] = 0.0
    head = model.lm_head.weight
    head[:, 0] = 0.0
    head[:UNLIKELY] = 0.0
    head[:UNLIKELY, 0] = DEPTH


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: a token for each character."""
    own = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[(NEVER, NEVER)]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token=END, model_max_length=CONTEXT, clean_up_tokenization_spaces=False
    )


def export_tiny(folder: Path, seed: int = 0) -> tuple[str, ...]:
    """Write the tiny model to a folder, and return the names of its files.

    Without the package gguf the file for llama.cpp and Ollama is left out.

    Raises:
        InvalidParameter: the folder holds something already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InvalidParameter(f"{folder} holds files already: name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    model = engine_target(seed)
    with held_back():
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")
    if not GGUF.missing:
        _write_gguf(folder / GGUF_FILE, model)
        (folder / MODELFILE).write_text(f"FROM ./{GGUF_FILE}\nTEMPLATE {{{{ .Prompt }}}}\n")
    return tuple(sorted(one.name for one in folder.iterdir()))


def _write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    import gguf

    out = gguf.GGUFWriter(str(path), "llama")
    out.add_name("polydraft tiny")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(WIDTH // HEAD)
    out.add_head_count_kv(WIDTH // HEAD)
    out.add_layer_norm_rms_eps(EPSILON)
    out.add_rope_freq_base(BASE)
    out.add_rope_dimension_count(HEAD)
    out.add_vocab_size(len(WORDS))
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(list(WORDS))
    out.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(WORDS) - 1)])
    out.add_token_merges([f"{NEVER} {NEVER}"])
    out.add_eos_token_id(0)
    out.add_bos_token_id(0)
    out.add_add_bos_token(False)
    for name, weight in _tensors(model).items():
        out.add_tensor(name, np.ascontiguousarray(weight.numpy()))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the weights by their names in GGUF files, queries and keys in the order of llama.cpp."""
    state = {name: one.detach() for name, one in model.state_dict().items()}
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            turned = theirs in ("attn_q", "attn_k")
            found[f"blk.{layer}.{theirs}.weight"] = _interleaved(weight) if turned else weight
    return found


def _interleaved(weight: Tensor) -> Tensor:
    """Return rows of queries or keys with the halves of each head in turns, as llama.cpp rotates them."""
    return weight.view(WIDTH // HEAD, 2, -1, WIDTH).transpose(1, 2).reshape(weight.shape)
