from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polydraft.training.token_files import END_OF_TEXT, Windows, encode_files, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", "class Point:\n    def __init__(self, x):\n        self.x = x\n"] * 20
TOKENIZER = train_tokenizer(TEXTS, vocab_size=400, context=64)


@given(st.text())
def test_every_text_decodes_to_itself(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text


def test_a_line_break_and_its_indentation_are_one_token() -> None:
    assert "Ċ" + "Ġ" * 4 in TOKENIZER.get_vocab()


def test_windows_cut_the_token_file_in_order(tmp_path: Path) -> None:
    count = encode_files(TOKENIZER, TEXTS, tmp_path / "tokens", chunk=7)
    whole = [token for text in TEXTS for token in (*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id)]
    assert count == len(whole)
    windows = Windows(tmp_path / "tokens", 16)
    assert len(windows) == len(whole) // 16
    joined = np.concatenate([windows[i]["input_ids"].numpy() for i in range(len(windows))])
    assert joined.tolist() == whole[: 16 * len(windows)]


def test_ids_of_a_large_vocabulary_are_kept(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({END_OF_TEXT: 0, "low": 1, "high": 2**16 + 1, "highest": 262_143}, "low"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END_OF_TEXT)
    encode_files(tokenizer, ["low high highest"], tmp_path / "tokens")
    assert Windows(tmp_path / "tokens", 4)[0]["input_ids"].tolist() == [1, 2**16 + 1, 262_143, 0]
