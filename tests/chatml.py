"""A tiny chat model: random weights, a byte-level tokenizer, and a template like that of real ones."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polydraft.training.token_files import train_tokenizer

START, END = "<|im_start|>", "<|im_end|>"
TEXT = ["How many are there? There are three: one, two and three.\n", "Say 点 or €.\n"] * 20
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer of some 300 tokens, the last two of which begin and end a message."""
    tokenizer = train_tokenizer(TEXT, vocab_size=320, context=4096)
    assert tokenizer.add_special_tokens({"additional_special_tokens": [START, END]}) == 2
    tokenizer.chat_template = template
    tokenizer.eos_token = END
    return tokenizer


def chat_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, context: int = 4096) -> LlamaForCausalLM:
    """Return a random model whose texts end with what ends a message, if they end."""
    end = tokenizer.convert_tokens_to_ids(END)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=end,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def save_chat_model(folder: Path, *, context: int = 4096, template: str | None = CHATML) -> Path:
    """Save model and tokenizer as a folder, and return it."""
    tokenizer = chat_tokenizer(template)
    chat_model(tokenizer, context=context).save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder
