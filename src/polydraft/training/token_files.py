"""Files of token ids, cut into equal training windows: those of the corpus, and those of the text that a target writes.

A draft is asked about what its target writes, not about what people wrote. So it is distilled on that too: random
beginnings out of a token file -> the target writes on, many rows at a time -> another token file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from polydraft.models.compiled import draft_model
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.probs import Noise, sample

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
    """Equal windows of a token file, as `{"input_ids": Int["t"]}`, in file order."""

    def __init__(self, path: Path, length: int) -> None:
        self.ids = np.memmap(path, dtype=TOKEN, mode="r")
        self.length = length

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.ids[index * self.length : (index + 1) * self.length]
        return {"input_ids": torch.from_numpy(window.astype(np.int64))}


@dataclass(frozen=True)
class OwnText:
    """How much text a target writes.

    Args:
        batches: how many times `rows` texts.
        rows: texts that are written together.
        given: tokens at the beginning of a text that are the corpus's.
        written: tokens that the target adds.
        seed: of the beginnings' places and of the tokens.
    """

    batches: int
    rows: int
    given: int
    written: int
    seed: int


def write_own_text(target: PreTrainedModel, text: Path, path: Path, amount: OwnText) -> None:
    """Append texts that begin as the training text does and go on as the target would, until there are enough.

    On such text a draft meets the prefixes that it will be asked about (on-policy distillation: DistillSpec,
    arXiv 2310.08461, section 4; arXiv 2306.13649). Each batch has its own random numbers, so a run that was
    interrupted goes on with the batch that it did not finish and writes what one run would have written.

    Args:
        target: the model that writes, at temperature 1.
        text: a token file; every text begins with a window of it at a random place.
        path: the token file to write.
        amount: batches in all, those in the file already included, and their sizes.
    """
    model, rows = draft_model(target), amount.rows
    size = np.dtype(TOKEN).itemsize * rows * (amount.given + amount.written)
    done = path.stat().st_size // size if path.is_file() else 0
    ids = np.memmap(text, dtype=TOKEN, mode="r")
    with path.open("ab") as out:
        out.truncate(done * size)
        for batch in tqdm(range(done, amount.batches), "the target writes", initial=done, total=amount.batches):
            (random,) = Noise.from_seed(amount.seed + batch, 1).generators
            places = torch.randint(len(ids) - amount.given, (rows,), generator=random).tolist()
            beginnings = np.stack([ids[place : place + amount.given] for place in places]).astype(np.int64)
            whole = continued(model, torch.from_numpy(beginnings), amount.written, random)
            out.write(whole.numpy().astype(TOKEN).tobytes())
            out.flush()


@torch.no_grad()
def continued(
    model: HuggingFaceModel, beginnings: Int[Tensor, "b n"], written: int, random: torch.Generator
) -> Int[Tensor, "b m"]:
    """Return the beginnings with `written` sampled tokens after each; all rows have the same length throughout."""
    batch, given = beginnings.shape
    length = given + written
    cache = model.new_cache(batch, length)
    tokens = torch.cat([beginnings, beginnings.new_zeros(batch, written)], -1)
    positions = torch.arange(length).expand(batch, -1)
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    done = 0
    for end in range(given, length):
        mask = earlier[done:end, :end].expand(batch, -1, -1)
        starts = torch.full((batch,), done)
        passed = model.forward(tokens[:, done:end], positions[:, done:end], mask, cache, starts, logits_to_keep=1)
        uniforms = torch.rand(batch, generator=random, dtype=torch.float64)
        tokens[:, end] = sample(passed.logits[:, -1].double().softmax(-1), uniforms)
        done = end
    return tokens


class Alternating(Dataset[dict[str, Tensor]]):
    """Windows of two token files in turn, so that a run sees as much of the shorter one as of the longer.

    Args:
        first: windows with even numbers.
        second: windows with odd numbers; both begin again when they are through, until the longer one is.
    """

    def __init__(self, first: Windows, second: Windows) -> None:
        self.both = (first, second)

    def __len__(self) -> int:
        return 2 * max(map(len, self.both))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        windows = self.both[index % 2]
        return windows[(index // 2) % len(windows)]
