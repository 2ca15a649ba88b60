"""Token windows: the corpus as one long array of token ids, cut into equal training windows."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
TOKEN = np.uint32
"""The type of a token id in a token file; sixteen bits would wrap the ids of vocabularies over 65,536 tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; every byte string has an encoding and decodes to itself.

    Indentation is kept together with the line break before it (one token for a newline and its spaces),
    because indentation is the commonest string of a Python file.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_python_words(), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _python_words():
    from tokenizers import Regex

    return Regex(r"\n[ ]*|[ ]?[A-Za-z_]+|[ ]?[0-9]{1,3}|[ ]?[^\sA-Za-z0-9_]+|[ ]+|\s")


def encode_files(tokenizer: PreTrainedTokenizerFast, texts: list[str], path: Path, chunk: int = 256) -> int:
    """Write the token ids of all texts, each closed by the end-of-text id, to `path`; return how many."""
    end = tokenizer.eos_token_id
    count = 0
    with path.open("wb") as out:
        for first in range(0, len(texts), chunk):
            for ids in tokenizer(texts[first : first + chunk], add_special_tokens=False)["input_ids"]:
                row = np.asarray([*ids, end], dtype=TOKEN)
                out.write(row.tobytes())
                count += row.size
    return count


class Windows(Dataset[dict[str, Tensor]]):
    """Equal windows of a token file, as `{"input_ids": Int["t"]}`, in file order.

    Args:
        path: a token file written by `encode_files`.
        length: tokens per window.
    """

    def __init__(self, path: Path, length: int) -> None:
        self.ids = np.memmap(path, dtype=TOKEN, mode="r")
        self.length = length

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.ids[index * self.length : (index + 1) * self.length]
        return {"input_ids": torch.from_numpy(window.astype(np.int64))}
