"""What a head is trained on: the target's own text with the hidden states that it was written with, in shards.

A head meets the target's text and nothing else, so it learns on that (on-policy distillation: DistillSpec,
arXiv 2310.08461, section 4). A shard is a safetensors file of equally long rows:

    ids[n t]          token ids
    valid[n t]        1 where the target wrote the token, so that it may be asked for
    features[n t r]   the hidden states that heads read, layers joined in the folder's order; bfloat16
    final[n t d]      the hidden states behind the last norm, which give the target's law; bfloat16
    lse[n t]          log of the sum of exp of the target's logits at temperature 1, where the next token is valid
    heat[n]           the temperature that the text was written at

Shards of encoder-decoders hold other tensors (`source_answers.py`).

Rows are read one by one, so that a folder may be larger than memory. Every shard has random numbers of its own, and is
there as a whole or not at all; so a run that was interrupted goes on with the shard that it did not finish, and writes
what one run would have written.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from polydraft.errors import InvalidParameter, ResultsError
from polydraft.models import HuggingFaceModel, Layer
from polydraft.probs import UNFILTERED, Noise, SamplingParams, filters_in_force
from polydraft.training.heads.source_answers import answered, next_tokens

TEMPERATURES = (1.0, 0.0, 0.7, 1.0)
"""Temperatures of the texts, in turn: heads are asked at all of them, and at 1 most texts differ."""
HEAT = "heat"
"""The tensor of temperatures, which few losses ask for."""
BYTES_OF_NUMBERS = 9
"""Bytes per token beside hidden states: id, whether it may be asked for, and the logits' sum, or a part of a source."""


@dataclass(frozen=True)
class WritingPlan:
    """How much is written, and how.

    Args:
        tokens: of all texts together, the held-out ones not counted; whole shards are written.
        length: tokens of each text, its prompt included.
        rows: texts that are written at once, which are a shard.
        past_end: write on behind an end token, as a chat goes on; else what follows it is not learnt from.
        seed: of prompts and samples.
        most_bytes: refuse to write more than this.

    Raises:
        InvalidParameter: less than one token, text or row, or texts too short to learn from.
    """

    tokens: int = 500_000
    length: int = 384
    rows: int = 64
    past_end: bool = False
    seed: int = 1
    most_bytes: int = 20_000_000_000

    def __post_init__(self) -> None:
        if min(self.tokens, self.rows) < 1 or self.length < 16:
            raise InvalidParameter(
                f"A head learns from texts of at least 16 tokens, not from {self.tokens} tokens in texts of "
                f"{self.length}, {self.rows} at once."
            )

    @property
    def shards(self) -> int:
        """How many shards are written."""
        return -(-self.tokens // (self.rows * self.length))

    @property
    def longest_prompt(self) -> int:
        """How many tokens a prompt has at most: a quarter of each text, or more, is the target's own."""
        return self.length * 3 // 4

    def fitting(self, prompts: Sequence[Int[Tensor, " _"]]) -> list[Int[Tensor, " _"]]:
        """Return the prompts that are short enough; the others are left out.

        Raises:
            InvalidParameter: these are fewer than two, one to learn from and one that is held out.
        """
        found = [one for one in prompts if 0 < len(one) <= self.longest_prompt]
        if len(found) < 2:
            raise InvalidParameter(
                f"A head needs two prompts or more of at most {self.longest_prompt} tokens, which is three quarters of "
                f"a text (length {self.length}); of {len(prompts)} given {len(found)} can be used; give more such, "
                "or a larger length."
            )
        return found


@dataclass(frozen=True)
class WrittenShards:
    """The shards that were written."""

    learnt: list[Path]
    held_out: list[Path]


def write_shards(
    target: HuggingFaceModel,
    prompts: Sequence[Int[Tensor, " _"]],
    folder: Path,
    reads: tuple[Layer, ...],
    writing: WritingPlan,
    end_ids: Sequence[int] = (),
    *,
    held_out: int | None = None,
    heats: tuple[float, ...] = TEMPERATURES,
    filters: SamplingParams = UNFILTERED,
    going: Callable[[], bool] = lambda: True,
) -> WrittenShards:
    """Write texts behind prompts, some of which are kept for the held-out shard.

    Args:
        prompts: how texts begin; those that are longer than `writing.longest_prompt` are left out.
        folder: where to; what is there already is not written again.
        reads: which layers' outputs heads read.
        end_ids: tokens that end a text.
        held_out: how many of the prompts that are short enough are kept; None for one in sixteen, at least one.
        heats: the temperatures of the texts, in turn.
        filters: of what the target draws (top_k, top_p, ...), at their temperature of 1.
        going: asked before every shard behind the first one to learn from; where it says no, there are fewer.

    Raises:
        InvalidParameter: fewer than two prompts are short enough, or it would be more than `writing.most_bytes`.
        ResultsError: the folder holds text that was written otherwise.
    """
    fitting = writing.fitting(prompts)
    check_size(target, reads, writing)
    folder.mkdir(parents=True, exist_ok=True)
    usual = heats == TEMPERATURES and held_out is None
    settings = ({} if usual else {"heats": heats, "held_out": held_out}) | filters_in_force(filters)
    _check_settings(
        folder / "writing.json",
        target,
        fitting,
        reads,
        writing,
        settings,
    )
    (order,) = Noise.from_seed(writing.seed, 1).generators
    mixed = [fitting[place] for place in torch.randperm(len(fitting), generator=order).tolist()]
    kept, files = held_out_of(len(mixed)) if held_out is None else held_out, list[Path]()
    names = ["held-00000", *(f"shard-{number:05d}" for number in range(writing.shards))]
    for number, name in enumerate(tqdm(names, "the target writes", unit="shard")):
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            if number > 1 and not going():
                break
            own = mixed[:kept] if number == 0 else mixed[kept:]
            _write(target, own, path, number, (reads, end_ids, heats, filters), writing)
        files.append(path)
    return WrittenShards(files[1:], files[:1])


def check_size(target: HuggingFaceModel, reads: tuple[Layer, ...], writing: WritingPlan) -> None:
    """Raise `InvalidParameter` if the shards would take more than `writing.most_bytes`."""
    states = 0 if target.facts.encodes else 2 * (len(reads) + 1) * target.width
    each = states + BYTES_OF_NUMBERS
    size = (writing.shards + 1) * writing.rows * writing.length * each
    if size > writing.most_bytes:
        raise InvalidParameter(
            f"The hidden states of {writing.tokens} tokens take {size / 1e9:.1f} GB, and at most "
            f"{writing.most_bytes / 1e9:g} GB may be written; ask for fewer tokens."
        )


def _write(
    target: HuggingFaceModel,
    prompts: Sequence[Int[Tensor, " _"]],
    path: Path,
    number: int,
    how: tuple[tuple[Layer, ...], Sequence[int], tuple[float, ...], SamplingParams],
    writing: WritingPlan,
) -> None:
    """Write one shard, first beside its place: with these layers, end tokens, temperatures and filters."""
    reads, end_ids, turns, filters = how
    first = max(number - 1, 0) * writing.rows
    texts = range(first, first + writing.rows)
    given = [prompts[text % len(prompts)] for text in texts]
    heats = torch.tensor([_heat(text, len(prompts), turns) for text in texts], device=target.device)
    (random,) = Noise.from_seed(writing.seed + 1 + number, 1).generators
    if target.facts.encodes:
        sizes, ends = (writing.length, writing.longest_prompt), () if writing.past_end else end_ids
        found = answered(target, given, heats, sizes, ends, random, filters)
    else:
        found = continued(target, given, heats, writing.length, reads, random, filters)
    if not writing.past_end:
        found["valid"] *= _before_end(found["ids"], found["valid"], end_ids)
    found[HEAT] = heats
    beside = path.with_suffix(".part")
    save_file({name: value.contiguous().cpu() for name, value in found.items()}, beside, {"layers": json.dumps(reads)})
    os.replace(beside, path)


def written_at_one(files: WrittenShards) -> tuple[Int[Tensor, "b t"], Shaped[Tensor, "b t"]]:
    """Return the held-out texts that were written at temperature 1, and which of their tokens the target wrote."""
    with safe_open(str(files.held_out[0]), framework="pt") as opened:
        ids, valid, heats = (opened.get_tensor(name) for name in ("ids", "valid", HEAT))
    warm = heats == 1
    return ids[warm].long(), valid[warm].bool()


def held_out_of(prompts: int) -> int:
    """Return how many of so many prompts are kept for the held-out shard: one in sixteen, at least one."""
    return max(1, prompts // 16)


def _heat(text: int, prompts: int, heats: tuple[float, ...]) -> float:
    """Return a text's temperature: greedy once for a prompt, since it would be the same text again."""
    turn, place = divmod(text, prompts)
    heat = heats[(place + turn) % len(heats)]
    return heat if heat or turn < len(heats) else max(heats) or 1.0


@torch.no_grad()
def continued(
    target: HuggingFaceModel,
    given: Sequence[Int[Tensor, " _"]],
    heats: Float[Tensor, " b"],
    length: int,
    reads: tuple[Layer, ...],
    random: torch.Generator,
    filters: SamplingParams = UNFILTERED,
) -> dict[str, Tensor]:
    """Return prompts written on to `length` tokens, as a shard's tensors.

    Shorter prompts are written on while longer ones are still read, so that no row has padding.
    """
    rows, device = len(given), target.device
    lengths = torch.tensor([len(one) for one in given], device=device)
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    for row, one in enumerate(given):
        ids[row, : len(one)] = one
    cache, positions = target.new_cache(rows, length), torch.arange(length, device=device).expand(rows, -1)
    earlier = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    features = torch.zeros(rows, length, len(reads) * target.width, dtype=torch.bfloat16, device=device)
    final = torch.zeros(rows, length, target.width, dtype=torch.bfloat16, device=device)
    total, done = torch.zeros(rows, length, device=device), 0
    for end in range(int(lengths.min()), length + 1):
        passed = target.forward(
            ids[:, done:end],
            positions[:, done:end],
            earlier[done:end, :end].expand(rows, -1, -1),
            cache,
            torch.full((rows,), done, device=device),
            logits_to_keep=1,
            hidden_layers=(*dict.fromkeys((*reads, "final")),),
        )
        final[:, done:end] = passed.hidden["final"].bfloat16()
        if reads:
            features[:, done:end] = torch.cat([passed.hidden[layer] for layer in reads], -1).bfloat16()
        logits = passed.logits[:, -1].float()
        total[:, end - 1] = logits.logsumexp(-1)
        if end < length:
            ids[:, end] = ids[:, end].where(lengths > end, next_tokens(logits, heats, random, filters))
        done = end
    valid = (torch.arange(length, device=device) >= lengths.unsqueeze(-1)).to(torch.uint8)
    return {"ids": ids.int(), "valid": valid, "features": features, "final": final, "lse": total}


def _before_end(ids: Int[Tensor, "b t"], valid: Shaped[Tensor, "b t"], end_ids: Sequence[int]) -> Shaped[Tensor, "b t"]:
    """Return 1 up to the first end token that the target wrote, and 0 behind it."""
    ends = torch.isin(ids.long(), torch.tensor(list(end_ids), dtype=torch.int64, device=ids.device)) & valid.bool()
    return (ends.int().cumsum(-1) - ends.int() == 0).to(torch.uint8)


def _check_settings(
    path: Path,
    target: HuggingFaceModel,
    prompts: Sequence[Int[Tensor, " _"]],
    reads: tuple[Layer, ...],
    writing: WritingPlan,
    others: dict[str, Any],
) -> None:
    """Note how the texts are written, or check that those in the folder were written so; more of them may follow."""
    digest = hashlib.sha256(json.dumps([one.tolist() for one in prompts]).encode()).hexdigest()
    weights = target.embedded(torch.arange(min(64, target.vocab_size), device=target.device).unsqueeze(0))
    own = {
        **{name: value for name, value in asdict(writing).items() if name not in ("tokens", "most_bytes")},
        "reads": list(reads),
        "prompts": digest,
        "target": hashlib.sha256(weights.detach().float().cpu().numpy().tobytes()).hexdigest(),
        **json.loads(json.dumps(others)),
    }
    if not path.is_file():
        path.write_text(json.dumps(own, indent=1))
        return
    try:
        there = json.loads(path.read_text())
    except ValueError as error:
        raise ResultsError(f"{path} is damaged; begin in an empty folder.") from error
    other = [name for name, value in own.items() if not isinstance(there, dict) or there.get(name) != value]
    if other:
        raise ResultsError(f"{path.parent} holds text with another {', '.join(other)}; begin in an empty folder.")


class Shards(Dataset[dict[str, Tensor]]):
    """The rows of a folder's shards, as `{"ids": Int["t"], "valid": ..., ...}`.

    Args:
        files: the shards.
        reads: which layers' features are wanted, in this order; None for all of them.
        heats: whether rows tell the temperature that they were written at.

    Raises:
        ResultsError: there is no shard, or the layers are not in them.
    """

    def __init__(self, files: list[Path], reads: tuple[Layer, ...] | None = None, *, heats: bool = False) -> None:
        if not files:
            raise ResultsError("There is no text of the target to train on.")
        self.files = files
        self.open: dict[int, Any] = {}
        self.left_out = set[str]() if heats else {HEAT}
        self.layers: tuple[Layer, ...] = tuple(json.loads(self._file(0).metadata()["layers"]))
        missing = sorted(set(reads or ()) - set(self.layers))
        if missing:
            raise ResultsError(f"The features of layer {missing[0]} are not in {files[0].parent}.")
        self.wanted = [self.layers.index(one) for one in reads or self.layers]
        self.rows = [self._file(place).get_slice("ids").get_shape()[0] for place in range(len(files))]

    def _file(self, place: int) -> Any:
        if place not in self.open:
            self.open[place] = safe_open(str(self.files[place]), framework="pt")
        return self.open[place]

    def __len__(self) -> int:
        return sum(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = 0
        while index >= self.rows[place]:
            index, place = index - self.rows[place], place + 1
        file = self._file(place)
        names = {*file.keys()} - self.left_out
        row = {name: file.get_slice(name)[index : index + 1][0] for name in names}
        if "source" in row:
            return {**row, "ids": row["ids"].long(), "source": row["source"].long()}
        layers = max(1, len(self.layers))
        features = row["features"].unflatten(-1, (layers, row["features"].shape[-1] // layers))[:, self.wanted]
        return {
            **row,
            "ids": row["ids"].long(),
            "features": features.flatten(-2).float(),
            "final": row["final"].float(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "open": {}}


def share_written(files: Sequence[Path], tokens: Int[Tensor, " v"]) -> float:
    """Return how much of what the target wrote some tokens are."""
    inside, total = 0, 0
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            written = opened.get_tensor("ids")[opened.get_tensor("valid").bool()].long()
        inside, total = inside + int(torch.isin(written, tokens.cpu()).sum()), total + len(written)
    return inside / max(1, total)


def most_written(
    files: Sequence[Path], vocab_size: int, rows: int | None, device: torch.device
) -> Int[Tensor, " v"] | None:
    """Return the tokens that the target wrote most often, rising; None for all of them."""
    if rows is None or rows >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            written = opened.get_tensor("ids")[opened.get_tensor("valid").bool()].long()
            counts += torch.bincount(written, minlength=vocab_size)
    return counts.topk(rows).indices.sort().values.to(device)
