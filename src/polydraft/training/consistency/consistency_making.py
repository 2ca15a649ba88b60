"""From a target and prompts to a model whose blocks end after few passes of Jacobi's iteration, with its card."""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, UnsupportedModel
from polydraft.models import HuggingFaceModel, Layer, check_same_size
from polydraft.models.checks.layout import sizes_of
from polydraft.probs import Noise
from polydraft.training.alignment.draft_training import splits
from polydraft.training.consistency.consistency_loss import LAW, ConsistencySettings, ConsistencyTraining
from polydraft.training.consistency.trajectories import (
    BlockReader,
    Convergence,
    TextsWithBlocks,
    convergence,
    jacobi_states,
    repeating,
    write_trajectories,
)
from polydraft.training.heads.head_making import end_ids_of
from polydraft.training.heads.loop import HeadRecipe, measured, train_head
from polydraft.training.heads.losses.masked_training import copied
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.losses.tuned_target import Drift, save_whole
from polydraft.training.heads.shards import Shards, WritingPlan, WrittenShards, check_size, write_shards

HEATS, READS = (0.0,), cast(tuple[Layer, ...], ("final",))
"""The temperatures of the texts, greedy once behind a prompt; of the states that shards hold none but the last."""
BLOCK = "jacobi_block"
"""What a written model's configuration says of its blocks, by which it drafts for another (`JacobiBlockDrafter`)."""
HELD_OUT = 16
"""On how many held-out texts passes are counted."""


@dataclass(frozen=True)
class ConsistencyPlan:
    """Everything that a consistent model is made by.

    Args:
        settings: how it learns.
        writing: the target's text.
        recipe: the training run.
        name: what the target is called on the card.
    """

    settings: ConsistencySettings = field(default_factory=ConsistencySettings)
    writing: WritingPlan = field(default_factory=WritingPlan)
    recipe: HeadRecipe = field(default_factory=lambda: HeadRecipe(matrix_rate=1e-3, other_rate=5e-4))
    name: str = "its target"

    def folders(self, learner: nn.Module) -> tuple[str, str]:
        """Return what the folders of a model's trajectories and of its checkpoints are called."""
        writing = {name: value for name, value in asdict(self.writing).items() if name not in ("tokens", "most_bytes")}
        blocks: list[Any] = [self.settings.block, self.recipe.seed, writing, _weights(learner)]
        run = [asdict(self.settings), asdict(self.recipe), self.writing.tokens, blocks]
        return f"blocks-{_digest(blocks)}", f"consistency-{_digest(run)}"


@dataclass(frozen=True)
class MadeConsistent:
    """A model that was tuned and written.

    Args:
        folder: where it is.
        tuned_from: the target's name.
        draft: whether it is a draft for the target, and not the target tuned, which would be another model.
        before: how blocks came to their ends before, in the model's own iteration on held-out text.
        after: how they do now.
        overlap: before and after, the mean overlap of rows behind a block's wrong guesses with what they learn.
        drift: how far a tuned target is from what it was; None for a draft.
        repeats: the share of blocks that were left out, since they repeat what stands before them.
        seconds: how long it learnt, since the run was begun or gone on with.
    """

    folder: Path
    tuned_from: str
    draft: bool
    before: Convergence
    after: Convergence
    overlap: tuple[float, float]
    drift: Drift | None
    repeats: float
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, for JSON."""
        return {**asdict(self), "folder": str(self.folder), "another_model": not self.draft}


def make_consistent(
    target: PreTrainedModel,
    prompts: Sequence[Int[Tensor, " _"]],
    work: Path,
    out: Path,
    plan: ConsistencyPlan = ConsistencyPlan(),
    noting: Callable[[], AbstractContextManager[Callable[[], bool]]] = lambda: nullcontext(lambda: False),
    start: PreTrainedModel | None = None,
) -> MadeConsistent:
    """Write the target's text and trajectories, tune a copy of the target or a draft on them, and write it.

    Args:
        prompts: how the target's texts begin.
        work: text, trajectories and checkpoints, the latter two in a folder for each plan.
        out: the tuned model's folder.
        noting: as for `make_head`.
        start: a draft model for the target, which is tuned in its room.

    Raises:
        KeyboardInterrupt: it was interrupted while the model learnt.
        PolydraftError: what `check_consistency` and `write_shards` raise.
        CheckpointError: the model cannot be written.
    """
    model, learner, size = HuggingFaceModel(target), target if start is None else start, plan.settings.block
    check_consistency(model, HuggingFaceModel(learner, fused=False), plan)
    ends = TargetEnds.of(target) if plan.settings.keep == LAW else None
    training = ConsistencyTraining(_copied(learner), model.vocab_size, plan.settings, ends)
    check_size(model, READS, plan.writing)
    text = write_shards(model, prompts, work / "text", READS, plan.writing, end_ids_of(target), heats=HEATS)
    blocks, run = plan.folders(learner)
    learnt, held_out = texts_with_blocks(training.reader, text, work / blocks, plan)
    first, began = _measured(training, held_out), perf_counter()
    with noting() as interrupted:
        train_head(training, learnt, held_out, work / run, plan.recipe, interrupted, target.device)
    seconds, last = perf_counter() - began, _measured(training, held_out)
    tuned = _as_before(training.network, learner, size)
    drift = Drift.of(target, tuned, Shards(text.held_out)) if start is None else None
    overlap, repeats = (first[1], last[1]), _repeats(learnt.shards, size)
    made = MadeConsistent(out, plan.name, start is not None, first[0], last[0], overlap, drift, repeats, seconds)
    card, was = card_of(made, plan, len(learnt) * plan.writing.length), plan.name if start is None else ""
    save_whole(tuned, out, target, card, tuned_from=was)
    return made


def check_consistency(target: HuggingFaceModel, learner: HuggingFaceModel, plan: ConsistencyPlan) -> None:
    """Check before any long work who can learn from whom.

    Raises:
        InvalidParameter: the texts have no room for two blocks, or go beyond a context or a window.
        UnsupportedModel: a model reads with an encoder, the learner cannot branch, or the target's rows are to be
            learnt and are no product of states and a table.
        VocabularyMismatch: the learner has other tokens.
    """
    size, length = plan.settings.block, plan.writing.length
    if length < 3 * size:
        raise InvalidParameter(f"Blocks of {size} tokens need texts of {3 * size} tokens or more, not of {length}.")
    for one in (target, learner):
        kind, most = type(one.model).__name__, min((one.facts.context, *sizes_of(one.windows)))
        if one.facts.encodes:
            raise UnsupportedModel(f"{kind} reads with an encoder, so it cannot learn blocks of guesses.")
        if length > most:
            raise InvalidParameter(
                f"{kind} sees {most} tokens at once; ask for texts of at most as many, not {length}."
            )
    if not learner.facts.branches:
        kind = type(learner.model).__name__
        raise UnsupportedModel(f"{kind} cannot take back what it has read, so it cannot learn blocks of guesses.")
    check_same_size(target.vocab_size, learner.vocab_size)
    if plan.settings.keep == LAW and not splits(target.model):
        kind = type(target.model).__name__
        raise UnsupportedModel(f"The rows of {kind} are no product of its last states and a table; keep to tokens.")


def texts_with_blocks(
    reader: BlockReader, text: WrittenShards, folder: Path, plan: ConsistencyPlan
) -> tuple[TextsWithBlocks, TextsWithBlocks]:
    """Return the texts to learn from and those that are held out, with trajectories of a model as it is now."""
    both = [
        TextsWithBlocks(Shards(files), write_trajectories(reader, files, folder, plan.settings.block, plan.recipe.seed))
        for files in (text.learnt, text.held_out)
    ]
    return both[0], both[1]


def _copied(learner: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in single precision that learns."""
    return copied(learner, 0, None).to(learner.device).requires_grad_(True).eval()  # pyright: ignore[reportArgumentType]  torch's `to` of a model


@torch.no_grad()
def _measured(training: ConsistencyTraining, texts: TextsWithBlocks) -> tuple[Convergence, float]:
    """Return how a model's own blocks end on held-out text, and the mean overlap of rows behind wrong guesses."""
    training.eval()
    device, size = training.network.device, training.settings.block
    rows = [texts[place] for place in range(min(HELD_OUT, len(texts)))]
    ids = torch.stack([row["ids"] for row in rows]).to(device)
    valid = torch.stack([row["valid"] for row in rows]).to(device)
    (random,) = Noise.from_seed(0, 1).generators
    states = [jacobi_states(training.reader, part, size, random, towards_text=False) for part in ids.split(4)]
    there = valid[:, size:].bool().unfold(1, size, size).all(-1)  # blocks that the target wrote from end to end
    overlap = measured(training, texts).overlap
    return convergence(torch.cat(states), there), sum(overlap) / len(overlap)


def _as_before(network: PreTrainedModel, learner: PreTrainedModel, size: int) -> PreTrainedModel:
    """Return what was learnt in the precision that the model came in, which says how large its blocks are."""
    made = copy.deepcopy(learner)
    made.load_state_dict({name: value.to(made.dtype) for name, value in network.state_dict().items()})
    setattr(made.config, BLOCK, size)
    return made


def _weights(learner: nn.Module) -> str:
    """Return a digest of a model's weights."""
    found = hashlib.sha256()
    for name, one in learner.named_parameters():
        found.update(name.encode())
        found.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest(made_by: list[Any]) -> str:
    return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:8]


def _repeats(shards: Shards, size: int) -> float:
    """Return the share of blocks that repeat what stands before them."""
    found = [repeating(shards[place]["ids"].unsqueeze(0), size) for place in range(len(shards))]
    return float(torch.cat(found).float().mean())


def card_of(made: MadeConsistent, plan: ConsistencyPlan, tokens: int) -> str:
    """Return the text of a tuned model's README.md."""
    own, recipe = plan.settings, plan.recipe
    table = "\n".join(
        f"| {name} | {first:.3f} | {last:.3f} |"
        for name, first, last in (
            ("passes until a block stays as it is", made.before.passes, made.after.passes),
            ("tokens fast-forwarded", made.before.fast_forwarded, made.after.fast_forwarded),
            ("tokens stationary", made.before.stationary, made.after.stationary),
            ("overlap of rows behind wrong guesses", *made.overlap),
        )
    )
    return f"""# {plan.name}, {"a draft that fills blocks" if made.draft else "tuned to end blocks early"}

{_law_in_words(made, plan)}

## Measured on held-out text of {plan.name}

Blocks of {own.block} tokens, from tokens drawn at random, {made.after.blocks} of them.

| | before | after |
|---|---|---|
{table}

{made.drift or ""}

## Data and recipe

`polydraft train consistency`: {tokens} tokens in texts of {plan.writing.length}.
{plan.name} wrote them, greedily once behind each prompt and then at temperature 1.
{made.repeats:.1%} of the blocks repeat what stands before them and were left out of the consistency.
{recipe.steps} steps of {recipe.texts} texts; Muon at {recipe.matrix_rate:g}, AdamW at {recipe.other_rate:g} for the
rest; seed {recipe.seed}. Kept to: {own.keep}, {own.weight:g} times as much as the consistency.
"""


def _law_in_words(made: MadeConsistent, plan: ConsistencyPlan) -> str:
    if made.draft:
        return f"""A draft model for {plan.name}, tuned so that it fills blocks of guesses in one pass. The target
verifies what it drafts, so texts follow the law of {plan.name}.

    polydraft generate --target TARGET --draft THIS_FOLDER "..." """
    return f"""**This is another model than {plan.name}.** Consistency training (CLLM, arXiv 2403.00835) tuned its
weights. With Jacobi decoding texts follow the law of this tuned model, and not that of {plan.name}:

    polydraft generate --target THIS_FOLDER --drafter jacobi "..."

As a draft for {plan.name} it fills blocks of guesses, and texts follow the law of {plan.name}:

    polydraft generate --target TARGET --draft THIS_FOLDER "..." """
