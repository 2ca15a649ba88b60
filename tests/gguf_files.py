"""Small GGUF files, and a wheel that holds one, made in memory: a Llama of two layers with a byte-level tokenizer."""

import json
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polydraft.training.token_files import train_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KEYS, WIDTH, INNER, LAYERS, CONTEXT = 4, 2, 32, 64, 2, 128
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


def tokens() -> tuple[list[str], list[str]]:
    """Return a byte-level vocabulary with two markers, and its merges."""
    learnt = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 20, vocab_size=300, context=CONTEXT)
    model = json.loads(learnt.backend_tokenizer.to_str())["model"]
    words = [word for word, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return [*words, "<|im_start|>", "<|im_end|>"], merges


def tiny_llama(vocab: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, architecture: str = "llama", kind: Any = None) -> LlamaForCausalLM:
    """Write a model to a GGUF file and return it; `kind` is a quantisation of its matrices, as in gguf."""
    words, merges = tokens()
    model = tiny_llama(len(words))
    out = gguf.GGUFWriter(str(path), architecture)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KEYS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_vocab_size(len(words))
    out.add_name("tiny")
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(words)
    out.add_token_types([3 if word.startswith("<|") else 1 for word in words])
    out.add_token_merges(merges)
    for name, word in (("bos", "<|im_start|>"), ("eos", "<|im_end|>"), ("pad", "<|im_end|>"), ("unk", "<|im_end|>")):
        getattr(out, f"add_{name}_token_id")(words.index(word))
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)
    for name, weight in tensors(model).items():
        rows = np.ascontiguousarray(weight.numpy())
        if kind is None or rows.ndim == 1:
            out.add_tensor(name, rows)
        else:
            out.add_tensor(name, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return model


def tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Return a model's weights by their names in GGUF files, queries and keys in the order of llama.cpp."""
    state = {name: one.detach() for name, one in model.state_dict().items()}
    found = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KEYS}.get(theirs)
            found[f"blk.{layer}.{theirs}.weight"] = weight if heads is None else halves_interleaved(weight, heads)
    return found


def halves_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_wheel(path: Path, member: str, content: bytes, name: str, version: str) -> Path:
    """Write a wheel that pip takes, with one file in it and a licence."""
    info = f"{name}-{version}.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"Do as you like.\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for one, bytes_ in files.items():
            archive.writestr(one, bytes_)
        archive.writestr(f"{info}/RECORD", "".join(f"{one},,\n" for one in [*files, f"{info}/RECORD"]))
    return path
