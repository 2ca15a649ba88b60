"""From a target and prompts to a head's folder: the target writes, the head learns, and is written with its card.

A head may begin with the weights of another, such as a published one.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from polydraft.drafters import Drafter, drafter_of, load_head, model_defaults, owned_models, owned_networks
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.errors import InvalidParameter, UnpairedScheme, hint
from polydraft.models import HuggingFaceModel, Layer, load_draft, module_of
from polydraft.models.anatomy import check_layer
from polydraft.probs import SamplingParams
from polydraft.training.alignment.draft_worth import TOGETHER, DraftWorth
from polydraft.training.alignment.own_text import OwnTexts, chains_of_text, check_chains
from polydraft.training.heads.loop import Drafting, HeadRecipe, Worth, train_head
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.losses.tuned_target import Drift
from polydraft.training.heads.makers import MAKERS
from polydraft.training.heads.new_heads import OFFICIAL, HeadSize, NewHead, usual_reads
from polydraft.training.heads.shards import (
    Shards,
    WritingPlan,
    WrittenShards,
    check_size,
    most_written,
    write_shards,
    written_at_one,
)


def begin_with(head: NewHead, start: Drafter, folder: Path, ends: TargetEnds) -> None:
    """Give a new head the weights of another, in place.

    Copies of its target's tables, which folders of some families hold, need no place in the new one, which shares them.
    A block head takes the layers of one with another path term or confidence head: what it has not keeps its new
    weights.

    Raises:
        InvalidParameter: it is of another kind, or has other sizes, or what it reads or draws is scaled.
    """
    new, old = ([*owned_networks(one)] for one in (head.drafter, start))
    if len(new) != len(old) or head.drafter.name != start.name:
        raise InvalidParameter(f"--start {folder} is a {start.name}, and the new head is a {head.drafter.name}.")
    for network, given in zip(new, old, strict=True):
        weights, own = given.state_dict(), network.state_dict()
        for name, table in (("embed_tokens.weight", ends.embedding), ("lm_head.weight", ends.rows)):
            if name not in own and _is_copy(weights.get(name), table):
                del weights[name]
        if isinstance(given, HeadEnds) and (given.scale, given.multiplier, given.softcap) != (1, 1, None):
            raise InvalidParameter(
                f"--start {folder} scales its embeddings or caps its logits, which heads that are trained here do not."
            )
        anew = _anew(network, given)
        weights = {name: value for name, value in weights.items() if not name.startswith(anew)}
        weights |= {name: value for name, value in own.items() if name.startswith(anew)}
        _check_shapes(own, weights, folder)
        network.load_state_dict(weights)


def _anew(network: nn.Module, given: nn.Module) -> tuple[str, ...]:
    """Return how the names begin of those parts of a network that do not begin with the given one's."""
    if not isinstance(network, BlockHead) or not isinstance(given, BlockHead):
        return ()
    if type(network.path) is not type(given.path):
        return ("path.", "confidence.", "mask_embed")
    wide = [None if one.confidence is None else one.confidence.in_features for one in (network, given)]
    return ("confidence.",) if wide[0] != wide[1] else ()


def _is_copy(weight: Tensor | None, table: Tensor) -> bool:
    """Tell whether a head's table is its target's, as far as bfloat16 says."""
    if weight is None or weight.shape != table.shape:
        return False
    return torch.allclose(weight.to(table), table, rtol=1e-2, atol=1e-6)


def _check_shapes(own: Mapping[str, Tensor], given: Mapping[str, Tensor], folder: Path) -> None:
    wanted, found = ({name: tuple(value.shape) for name, value in one.items()} for one in (own, given))
    other = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if other:
        has, needs = (_told(shapes.get(other[0])) for shapes in (found, wanted))
        raise InvalidParameter(
            f"--start {folder} has {other[0]} of the shape {has}, and the new head {needs}; "
            "take its kind, layers and drafts."
        )


def _told(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else " x ".join(map(str, shape)) or "one number"


def usual_form(kind: str, rows: int | None) -> str:
    """Return the form that a kind's folders have unless another is asked for.

    It is the official one, but for heads of fewer tokens than their target where that holds none: then the first that
    does.
    """
    fewer = MAKERS[kind].fewer if kind in MAKERS and rows is not None else ()
    return OFFICIAL if OFFICIAL in fewer else (*fewer, OFFICIAL)[0]


@dataclass(frozen=True)
class HeadPlan:
    """Everything that a head is made by.

    Args:
        kind: one of `MAKERS`.
        size: what it is made of.
        writing: the target's text.
        recipe: the training run.
        rows: how many of the target's tokens it drafts, those that the target wrote most often; None for all.
        form: of the folder: official, or another that the family has: speculators, vllm of Medusa, deepspec of DSpark,
            polydraft of walks.
        name: what the target is called on the card.
        start: the folder of a head of the same kind, whose weights, sizes and tokens it begins with; or None. A block
            head may begin with one that has another term: then the term and the confidence head are new. A draft model
            may begin with any other one that has the target's tokens.

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
        for name, asked, most in (
            ("drafts", self.size.drafts, maker.most_drafts),
            ("layers", self.size.layers, maker.most_layers),
        ):
            if None not in (asked, most) and cast(int, asked) > cast(int, most):
                found = f"at most {most}" if most else "no"
                raise InvalidParameter(f"A head of the kind {self.kind} has {found} {name}, but {asked} are asked for.")
        if self.size.loss not in maker.losses:
            raise InvalidParameter(
                f"A head of the kind {self.kind} learns by the loss {' or '.join(maker.losses)}, not {self.size.loss}."
            )
        if self.size.frozen_rows and not maker.own_rows:
            owners = " or ".join(kind for kind, one in MAKERS.items() if one.own_rows)
            raise InvalidParameter(
                f"A head of the kind {self.kind} has no rows that can be frozen; frozen rows are of {owners}."
            )
        if self.size.term is not None and not maker.termed:
            owners = " or ".join(kind for kind, one in MAKERS.items() if one.termed)
            raise InvalidParameter(f"A head of the kind {self.kind} has no term to choose; that is of {owners}.")
        if self.size.rank is not None and not maker.ranked:
            owners = " or ".join(kind for kind, one in MAKERS.items() if one.ranked)
            raise InvalidParameter(f"A head of the kind {self.kind} has no term of a rank; that is of {owners}.")
        if self.size.exit is not None and not maker.exits:
            owners = " or ".join(kind for kind, one in MAKERS.items() if one.exits)
            raise InvalidParameter(f"A head of the kind {self.kind} has no exit; that is of {owners}.")
        if self.rows is not None and self.rows < 1:
            raise InvalidParameter(f"A head drafts at least 1 token of its target's, not {self.rows}.")
        if self.start is not None and not maker.starts:
            raise InvalidParameter(f"A head of the kind {self.kind} begins with its target alone; leave start out.")
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
        seconds: how long it learnt, since the run was begun or gone on with.
        drift: how far the target is from the one that it was, if it learnt as well: drafts are exact for the tuned one.
        tokens_per_call: by rule, what chains of 1, 2, ... drafts bring on held-out text at temperature 1; None where
            that was not measured: of heads whose target learnt, or whose texts have sources.
    """

    folder: Path
    drafting: Drafting
    parameters: int
    tokens: int
    seconds: float
    drift: Drift | None = None
    tokens_per_call: dict[str, tuple[float, ...]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, for JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def make_head(
    target: PreTrainedModel,
    prompts: Sequence[Int[Tensor, " _"]],
    work: Path,
    out: Path,
    plan: HeadPlan,
    noting: Callable[[], AbstractContextManager[Callable[[], bool]]] = lambda: nullcontext(lambda: False),
) -> MadeHead:
    """Write the target's text, train a head on it, and write the head; every part goes on where it was interrupted.

    Args:
        prompts: how the target's texts begin.
        work: the target's text, which heads of all kinds may share, and checkpoints, a folder for each plan.
        out: the head's folder.
        noting: while the head learns, gives a function that tells whether it was interrupted: then the step in progress
            is the last, and a checkpoint is left.

    Raises:
        KeyboardInterrupt: it was interrupted while the head learnt.
        InvalidParameter: the prompts are too few or too long, the text would be too large, the head to begin with is
            of another kind or size, or the target has an encoder where the kind wants none, or the other way round.
        CheckpointError: the head to begin with is missing or damaged.
        ResultsError: the work folder holds something else.
        UnsupportedModel: the target's ends are no tables.
    """
    model = HuggingFaceModel(target)
    _check_target(model, plan.kind)
    start = None if plan.start is None else _opened(plan, model)
    reads: tuple[Layer, ...] = () if model.facts.encodes else _read_by(plan, model, start)
    _ends_of(target, None, plan)  # says before hours of work what cannot be trained
    check_size(model, reads, plan.writing)
    head = None if start is None else _begun(target, start, reads, plan)
    if head is not None:  # of some that can be read it is said before hours of work that they cannot be written
        with TemporaryDirectory() as nowhere:
            head.write(Path(nowhere) / "head", model, plan.form, "")
        if head.training.shortest > plan.writing.length:
            least, length = head.training.shortest, plan.writing.length
            raise InvalidParameter(f"The head to begin with learns from texts of {least} tokens or more, not {length}.")
    elif plan.rows is None:  # else which tokens it drafts follows from what the target writes
        head = _new(target, None, reads, plan, None)
    text = write_shards(model, prompts, work / "text", reads, plan.writing, end_ids_of(target))
    if head is None:
        head = _new(target, most_written(text.learnt, model.vocab_size, plan.rows, target.device), reads, plan, None)
    learnt = Shards(text.learnt)
    worth = (lambda: None) if head.drift is not None else partial(_tokens_per_call, head.drafter, model, text)
    with noting() as interrupted:
        run, began = work / run_name(plan), perf_counter()
        recipe, held_out = plan.recipe, Shards(text.held_out)
        found = train_head(head.training, learnt, held_out, run, recipe, interrupted, target.device, worth)
    return _written(head, model, out, plan, (found, perf_counter() - began), (text, worth))


def _read_by(plan: HeadPlan, model: HuggingFaceModel, start: Drafter | None) -> tuple[Layer, ...]:
    """Return which of the target's layers the head reads.

    Raises:
        InvalidParameter: the target has no such layers, or none behind an adapter's.
    """
    maker, usual = MAKERS[plan.kind], usual_reads(model.layers)
    own = None if start is None or not maker.reads_layers else start.needs.layers
    if maker.exits:
        exit_layer = plan.size.exit or (usual if own is None else own)[0]
        if exit_layer not in range(1, model.layers):
            raise InvalidParameter(
                f"An adapter stands behind 1 to {model.layers - 1} layers of this target, not {exit_layer}."
            )
        return usual if exit_layer == usual[0] else (exit_layer,)  # so that it may share the text of other heads
    for layer in own or ():
        check_layer(layer, model.layers)
    return own or usual


def run_name(plan: HeadPlan) -> str:
    """Return what the folder of a run's checkpoints is called: none goes on from the checkpoint of another plan."""
    writing = {name: value for name, value in asdict(plan.writing).items() if name != "most_bytes"}
    made_by: list[Any] = [asdict(plan.size), asdict(plan.recipe), writing, plan.rows]
    made_by += [] if plan.start is None else [str(plan.start.resolve())]
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()
    return f"{plan.kind}-{plan.size.loss}-{digest[:8]}"


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
    return MAKERS[plan.kind].make(target, _ends_of(target, tokens, plan), reads, plan.size, start)


def _ends_of(target: PreTrainedModel, tokens: Int[Tensor, " v"] | None, plan: HeadPlan) -> TargetEnds:
    """Return the ends that a head shares with its target; of a drafter for encoder-decoders nothing."""
    if MAKERS[plan.kind].encodes:
        return TargetEnds(torch.empty(0, 0), torch.empty(0, 0))
    return TargetEnds.of(target, tokens)


def _check_target(target: HuggingFaceModel, kind: str) -> None:
    """Raise `InvalidParameter` for a decoder where an encoder-decoder is wanted, or the other way round."""
    encodes, name = MAKERS[kind].encodes, type(target.model).__name__
    if encodes and not target.facts.encodes:
        raise InvalidParameter(
            f"A {kind} is for encoder-decoders, and {name} has no encoder; take another kind of head."
        )
    if target.facts.encodes and not encodes:
        owners = " or ".join(one for one, maker in MAKERS.items() if maker.encodes)
        raise InvalidParameter(
            f"A head of the kind {kind} is for decoders, and {name} has an encoder; the kind for these is {owners}."
        )


def _begun(target: PreTrainedModel, start: Drafter, reads: tuple[Layer, ...], plan: HeadPlan) -> NewHead:
    """Return a head with the weights and tokens of another one."""
    assert plan.start is not None
    listed = (getattr(network, "tokens", None) for network in owned_networks(start))
    tokens = next((one.to(target.device) for one in listed if one is not None), None)
    head = _new(target, tokens, reads, plan, networks_of(start)[0])
    if not MAKERS[plan.kind].is_model:  # which is made with the weights of the other one
        begin_with(head, start, plan.start, TargetEnds.of(target, tokens))
    return head


def _opened(plan: HeadPlan, target: HuggingFaceModel) -> Drafter:
    """Load what a head begins with: a head, or a draft model for a kind that is one."""
    name = str(plan.start)
    if MAKERS[plan.kind].is_model:
        return drafter_of(load_draft(name, target.model))
    return load_head(name, target.layers)


def networks_of(drafter: Drafter) -> tuple[nn.Module, ...]:
    """Return what learns in a drafter: its draft models and its networks."""
    models = [module_of(one) for one in owned_models(drafter)]
    return (*(one for one in models if one is not None), *owned_networks(drafter))


def _written(
    head: NewHead,
    model: HuggingFaceModel,
    out: Path,
    plan: HeadPlan,
    found: tuple[Drafting, float],
    own: tuple[WrittenShards, Worth],
) -> MadeHead:
    text, worth = own
    networks = networks_of(head.drafter)
    for network in networks:
        network.eval().requires_grad_(False)
    parameters = sum(one.numel() for network in networks for one in network.parameters())
    drift = None if head.drift is None else head.drift(Shards(text.held_out))
    tokens = len(Shards(text.learnt)) * plan.writing.length
    made = MadeHead(out, found[0], parameters, tokens, found[1], drift, worth())
    head.write(out, model, plan.form, card_of(made, plan, model))
    return made


PLACES = 64
"""Of how many tokens of a held-out text calls are counted."""


def _tokens_per_call(
    drafter: Drafter, model: HuggingFaceModel, text: WrittenShards
) -> dict[str, tuple[float, ...]] | None:
    """Return what a head is worth on held-out text at temperature 1; None if it cannot be measured so."""
    params = SamplingParams(temperature=1.0)
    length = (drafter.defaults(params) or model_defaults(params)).policy.shape.depth
    try:
        check_chains(model, drafter, length)
    except (InvalidParameter, UnpairedScheme):
        return None
    ids, valid = written_at_one(text)
    there = valid.any(-1)
    ids, valid = ids[there][:TOGETHER], valid[there][:TOGETHER]
    if not len(ids):
        return None
    texts = OwnTexts(ids, valid.int().argmax(-1), valid.sum(-1)).first(PLACES)
    return DraftWorth.of(chains_of_text(model, drafter, texts, params, length)).tokens_per_call


def calls_in_words(made: MadeHead) -> str:
    """Say what a chain of all drafts brings: as it was measured, else what follows if overlaps were independent."""
    found = made.tokens_per_call
    if found is None:
        calls = made.drafting.efficiency
        return f"If these were independent, a chain would have {calls:.2f} tokens per target call."
    told = " and ".join(f"{calls[-1]:.2f} {rule}" for rule, calls in found.items())
    length = len(next(iter(found.values())))
    return f"On text at temperature 1 a chain of {length} has {told}, in tokens per target call."


def card_of(made: MadeHead, plan: HeadPlan, model: HuggingFaceModel) -> str:
    """Return the text of a head's README.md."""
    recipe, overlaps = plan.recipe, " ".join(f"{one:.3f}" for one in made.drafting.overlap)
    rows = "all tokens" if plan.rows is None else f"the {plan.rows} tokens that the target wrote most often"
    rows = rows if plan.start is None else "the tokens of the head that it began with"
    began = "" if plan.start is None else f"It began with the weights of {plan.start.name}.\n"
    rows += " from rows of its own" if MAKERS[plan.kind].own_rows and not plan.size.frozen_rows else ""
    use, told = f"--target {plan.name} --draft THIS_FOLDER", ""
    rounded = " The weights were\nmeasured before they were rounded to bfloat16."
    if made.drift is not None:
        use, rounded = "--target THIS_FOLDER", ""
        told = f"""
## Another target

The folder is a whole model with what drafts inside. The target learnt with it, so that texts are exact for the tuned
model only, not for {plan.name}.
{made.drift}
"""
    kind = "model" if MAKERS[plan.kind].is_model else "head"
    what = f"A draft {kind} of {made.parameters / 1e6:.2f} M parameters"
    what = what if made.parameters else "No network: what the target makes of its masks drafts"
    behind = "of given sources" if model.facts.encodes else "behind given prompts"
    form = "" if plan.form == OFFICIAL else f", in the form of {plan.form}"
    return f"""# {plan.kind} head for {plan.name}

{what}{form}.
Its target has {model.layers} layers of width {model.width}; it drafts {rows}.

    polydraft generate {use} "..."
{told}
## Measured on held-out text

Mean overlap sum_x min(target, head) at temperature 1, by draft, given the text's own tokens above it: {overlaps}.
{calls_in_words(made)}{rounded}

## Data and recipe

`polydraft train head {plan.kind}`: {made.tokens} tokens in texts of {plan.writing.length}.
The target wrote them {behind}, at temperatures 0, 0.7 and 1.
{began}{recipe.steps} steps of {recipe.texts} texts; Muon at {recipe.matrix_rate:g}, and AdamW at {recipe.other_rate:g}
for tables, norms and biases, cosine schedule; loss: {plan.size.loss}; seed {recipe.seed}.
"""
