"""From a target and prompts to a head's folder: the target writes, the head learns, and is written with its card."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.drafters import Drafter, owned_networks
from polydraft.errors import InvalidParameter, hint
from polydraft.models import HuggingFaceModel, Layer
from polydraft.training.heads.loop import Drafting, HeadRecipe, train_head
from polydraft.training.heads.new_heads import MAKERS, OFFICIAL, READ_FINAL_STATE_ONLY, HeadSize, NewHead, usual_reads
from polydraft.training.heads.shard_writing import WritingPlan, check_size, write_shards
from polydraft.training.heads.shards import Shards, own_counts
from polydraft.training.heads.starting import begin_with, load_start, read_by, tokens_of
from polydraft.training.heads.targets import TargetEnds


@dataclass(frozen=True)
class HeadPlan:
    """Everything that a head is made by.

    Args:
        kind: one of `MAKERS`.
        size: what it is made of.
        writing: the target's text.
        recipe: the training run.
        rows: how many of the target's tokens it drafts, those that the target wrote most often; None for all.
        form: of the folder: official, or another that the family has: speculators, vllm of Medusa, deepspec of DSpark.
        name: what the target is called on the card.
        start: the folder of a head of the same kind, whose weights, sizes and tokens it begins with; or None. A block
            head may begin with one that has another term: then the term and the confidence head are new.

    Raises:
        InvalidParameter: there is no such kind, it has no such form, loss, term or rows, or it would draft no token.
    """

    kind: str
    size: HeadSize = field(default_factory=HeadSize)
    writing: WritingPlan = field(default_factory=WritingPlan)
    recipe: HeadRecipe = field(default_factory=HeadRecipe)
    rows: int | None = None
    form: str = OFFICIAL
    name: str = "its target"
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in MAKERS:
            meant = hint(self.kind, MAKERS)
            raise InvalidParameter(f"A head is of the kind {', '.join(MAKERS)}, not {self.kind!r}{meant}.")
        maker = MAKERS[self.kind]
        if self.form not in maker.forms:
            raise InvalidParameter(f"The form of {self.kind} heads is {' or '.join(maker.forms)}, not {self.form!r}.")
        if self.size.loss not in maker.losses:
            raise InvalidParameter(
                f"A head of the kind {self.kind} learns by the loss {' or '.join(maker.losses)}, not {self.size.loss}."
            )
        if self.size.frozen_rows and not maker.own_rows:
            owners = " or ".join(kind for kind, one in MAKERS.items() if one.own_rows)
            raise InvalidParameter(
                f"A head of the kind {self.kind} has the target's output rows anyway; frozen rows are of {owners}."
            )
        if (self.size.term, self.size.rank) != (None, None) and not maker.termed:
            owners = " or ".join(kind for kind, one in MAKERS.items() if one.termed)
            raise InvalidParameter(f"A head of the kind {self.kind} has no term of a rank; that is of {owners}.")
        if self.rows is not None and self.rows < 1:
            raise InvalidParameter(f"A head drafts at least 1 token of its target's, not {self.rows}.")
        if self.rows is not None and self.start is not None:
            raise InvalidParameter("A head that begins with another one has its tokens; leave rows out.")
        if self.size.inner is not None and self.start is not None:
            raise InvalidParameter("A head that begins with another one has layers of its width; leave inner out.")
        if self.rows is not None and self.form not in maker.fewer:
            found = f"take {' or '.join(maker.fewer)}, or leave rows out" if maker.fewer else "leave rows out"
            raise InvalidParameter(f"The {self.form} form of {self.kind} heads has all of a target's tokens; {found}.")


@dataclass(frozen=True)
class MadeHead:
    """A head that was trained and written.

    Args:
        folder: where it is.
        drafting: what it drafts like on held-out text.
        parameters: how many numbers it has.
        tokens: how many tokens of the target's text it learnt from.
    """

    folder: Path
    drafting: Drafting
    parameters: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, for JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def make_head(
    target: PreTrainedModel,
    prompts: Sequence[Int[Tensor, " n"]],
    work: Path,
    out: Path,
    plan: HeadPlan,
    noting: Callable[[], AbstractContextManager[Callable[[], bool]]] = lambda: nullcontext(lambda: False),
) -> MadeHead:
    """Write the target's text, train a head on it, and write the head; every part goes on where it was interrupted.

    Args:
        target: the model that it drafts for.
        prompts: how the target's texts begin.
        work: the target's text, which heads of all kinds may share, and checkpoints, a folder for each plan.
        out: the head's folder.
        plan: everything else.
        noting: while the head learns, gives a function that tells whether it was interrupted: then the step in progress
            is the last, and a checkpoint is left.

    Raises:
        KeyboardInterrupt: it was interrupted while the head learnt.
        InvalidParameter: the prompts are too few or too long, the text would be too large, or the head to begin with is
            of another kind or size.
        CheckpointError: the head to begin with is missing or damaged.
        ResultsError: the work folder holds something else.
        UnsupportedModel: the target's ends are no tables.
    """
    model = HuggingFaceModel(target)
    start = None if plan.start is None else load_start(plan.start, model)
    reads = usual_reads(model.layers) if start is None or plan.kind in READ_FINAL_STATE_ONLY else read_by(start, model)
    TargetEnds.of(target)  # says before hours of work what cannot be trained
    check_size(model, reads, plan.writing)
    head = None if start is None else _begun(target, start, reads, plan)
    if head is not None:
        _check_form(head, model, plan.form)
    text = write_shards(model, prompts, work / "text", reads, plan.writing, end_ids_of(target))
    if head is None:
        head = _new(target, most_written(text.learnt, model.vocab_size, plan.rows, target.device), reads, plan, None)
    learnt = Shards(text.learnt)
    with noting() as interrupted:
        run = work / run_name(plan)
        found = train_head(head.training, learnt, Shards(text.held_out), run, plan.recipe, interrupted, target.device)
    return _written(head, model, out, plan, found, len(learnt))


def run_name(plan: HeadPlan) -> str:
    """Return what the folder of a run's checkpoints is called: none goes on from the checkpoint of another plan."""
    writing = {name: value for name, value in asdict(plan.writing).items() if name != "most_bytes"}
    made_by: list[Any] = [asdict(plan.size), asdict(plan.recipe), writing, plan.rows]
    made_by += [] if plan.start is None else [str(plan.start.resolve())]
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()
    return f"{plan.kind}-{plan.size.loss}-{digest[:8]}"


def most_written(
    files: Sequence[Path], vocab_size: int, rows: int | None, device: torch.device
) -> Int[Tensor, " v"] | None:
    """Return the tokens that the target wrote most often, rising; None for all of them."""
    if rows is None or rows >= vocab_size:
        return None
    return own_counts([*files], vocab_size).topk(rows).indices.sort().values.to(device)


def end_ids_of(target: PreTrainedModel) -> list[int]:
    """Return the tokens that end a target's text."""
    end = target.generation_config.eos_token_id if target.generation_config else None
    return [] if end is None else [end] if isinstance(end, int) else [*end]


def _new(
    target: PreTrainedModel,
    tokens: Int[Tensor, " v"] | None,
    reads: tuple[Layer, ...],
    plan: HeadPlan,
    start: nn.Module | None,
) -> NewHead:
    """Return a head that has learnt nothing, for these of the target's tokens, of the sizes of another."""
    torch.manual_seed(plan.recipe.seed)
    return MAKERS[plan.kind].make(target, TargetEnds.of(target, tokens), reads, plan.size, start)


def _begun(target: PreTrainedModel, start: Drafter, reads: tuple[Layer, ...], plan: HeadPlan) -> NewHead:
    """Return a head with the weights and tokens of another one."""
    assert plan.start is not None
    tokens = tokens_of(start)
    tokens = None if tokens is None else tokens.to(target.device)
    head = _new(target, tokens, reads, plan, next(iter(owned_networks(start))))
    begin_with(head, start, plan.start, TargetEnds.of(target, tokens))
    return head


def _check_form(head: NewHead, model: HuggingFaceModel, form: str) -> None:
    """Write a head where it is thrown away: of some that can be read it is said before hours of work that they cannot.

    Raises:
        InvalidParameter: the form cannot say what it is.
    """
    with TemporaryDirectory() as nowhere:
        head.write(Path(nowhere) / "head", model, form, "")


def _written(
    head: NewHead, model: HuggingFaceModel, out: Path, plan: HeadPlan, found: Drafting, texts: int
) -> MadeHead:
    for network in owned_networks(head.drafter):
        network.eval().requires_grad_(False)
    parameters = sum(one.numel() for network in owned_networks(head.drafter) for one in network.parameters())
    made = MadeHead(out, found, parameters, texts * plan.writing.length)
    head.write(out, model, plan.form, card_of(made, plan, model))
    return made


def card_of(made: MadeHead, plan: HeadPlan, model: HuggingFaceModel) -> str:
    """Return the text of a head's README.md."""
    recipe, overlaps = plan.recipe, " ".join(f"{one:.3f}" for one in made.drafting.overlap)
    rows = "all tokens" if plan.rows is None else f"the {plan.rows} tokens that the target wrote most often"
    rows = rows if plan.start is None else "the tokens of the head that it began with"
    began = "" if plan.start is None else f"It began with the weights of {plan.start.name}.\n"
    rows += " from rows of its own" if MAKERS[plan.kind].own_rows and not plan.size.frozen_rows else ""
    form = "" if plan.form == OFFICIAL else f", in the form of {plan.form}"
    return f"""# {plan.kind} head for {plan.name}

A draft head of {made.parameters / 1e6:.2f} M parameters{form}.
Its target has {model.layers} layers of width {model.width}; it drafts {rows}.

    polydraft generate --target {plan.name} --draft THIS_FOLDER "..."

## Measured on held-out text

Mean overlap sum_x min(target, head) at temperature 1, by draft, given the text's own tokens above it: {overlaps}.
If these were independent, a chain would have {made.drafting.efficiency:.2f} tokens per target call. The weights were
measured before they were rounded to bfloat16.

## Data and recipe

`polydraft train head {plan.kind}`: {made.tokens} tokens in texts of {plan.writing.length}.
The target wrote them behind given prompts, at temperatures 0, 0.7 and 1.
{began}{recipe.steps} steps of {recipe.texts} texts; Muon at {recipe.matrix_rate:g}, and AdamW at {recipe.other_rate:g}
for tables, norms and biases, cosine schedule; loss: {plan.size.loss}; seed {recipe.seed}.
"""
