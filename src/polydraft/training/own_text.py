"""The target's own text, to distil from: a draft is asked about what its target writes, not about what people wrote.

Data flow: random beginnings out of a token file -> the target writes on, many rows at a time -> another token file.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from polydraft.models.fused import draft_model
from polydraft.models.hugging_face import HuggingFaceModel
from polydraft.probs import Noise, sample
from polydraft.training.windows import TOKEN, Windows


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
