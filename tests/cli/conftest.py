from pathlib import Path

import pytest
import torch
from chatml import save_chat_model
from transformers import LlamaConfig, LlamaForCausalLM

from polydraft.training.token_files import train_tokenizer

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "class Point:\n    def __init__(self, x):\n        self.x = x  # 点\n",
] * 20


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and draft model with one tokenizer, as saved folders."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(TEXT, vocab_size=320, context=128)
    for name, layers, seed in (("target", 2, 0), ("draft", 1, 1)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            initializer_range=0.3,
        )
        LlamaForCausalLM(config).save_pretrained(str(root / name))
        tokenizer.save_pretrained(str(root / name))
    return root / "target", root / "draft"


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model as a saved folder."""
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def small_chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context of 128 tokens."""
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model", context=128)
