"""The decode loop: draft a tree, score it, verify it, keep the accepted path, yield what was gained."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, Session, resumed
from polydraft.engine.block import Block, Emission
from polydraft.engine.calls.logprobs import with_logprobs
from polydraft.engine.calls.output import scores_of
from polydraft.engine.calls.past import Past, check_keys
from polydraft.engine.clock import UNTIMED, Clock
from polydraft.engine.lessons import lessons_of
from polydraft.engine.part import Part, beside, joint, parts_with, scored_trees, told_of, verdicts
from polydraft.engine.stopping import Ending, in_step
from polydraft.engine.target_law import TargetLaw, TargetRows, target_rows
from polydraft.errors import ContextOverflow
from polydraft.models import LanguageModel, can_branch
from polydraft.probs import Noise, sent, to_probs
from polydraft.reading import Reader, Scored, Step, Text, reader_of
from polydraft.rows import reuse
from polydraft.trees import (
    Piece,
    TokenTree,
    TreePolicy,
    Verdict,
    stacked_tree,
)
from polydraft.verifiers import TreeVerifier

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Method:
    """What decodes a batch.

    Args:
        target: the model whose law the output follows.
        drafter: proposes token trees.
        verifier: decides what to keep of them, and owns the scheme by which they are drawn.
        policy: the trees' shape.
        keeps_scores: whether blocks hold the target's logits and scores, of every node.
        logprobs: how many of the likeliest tokens are told with each token; None for no log-probabilities at all.
        teaches: the policies that learn from steps; blocks hold what they show of the chances of drafts under each.
        clock: what the parts of a step are charged to.
    """

    target: LanguageModel
    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy
    keeps_scores: bool = False
    logprobs: int | None = None
    teaches: tuple[TreePolicy, ...] = ()
    clock: Clock = UNTIMED

    @property
    def room(self) -> int:
        """The key slots that one step needs beside the text's own."""
        return room_for([(self.drafter, self.policy)])


@dataclass(frozen=True, eq=False)
class Prompts:
    """What is to be continued.

    Args:
        text: the prompts, at least one token per row.
        laws: per row, how the target's logits become distributions.
        endings: per row, where it ends; the largest length must leave room for a token.
        noise: one stream of random numbers per row; the same streams give the same text.
        sources: per row, what the target reads beside the text; None for nothing.
    """

    text: Text
    laws: Sequence[TargetLaw]
    endings: Sequence[Ending]
    noise: Noise
    sources: Sequence[Any] | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch in mid-text. `step` uses it up when it returns the next one, and leaves it alone if it does not return.

    Args:
        text: the committed tokens.
        laws: per row, how the target's logits become distributions.
        endings: per row, where it ends.
        noise: one stream of random numbers per row.
        steps: per row, the steps it has taken.
        going: the rows that have not ended.
        reader: the target, and what it has read.
        parts: what drafts and verifies; each row belongs to one of them.
    """

    text: Text
    laws: tuple[TargetLaw, ...]
    endings: tuple[Ending, ...]
    noise: Noise
    steps: tuple[int, ...]
    going: frozenset[int]
    reader: Reader
    parts: tuple[Part, ...]

    @property
    def unread(self) -> int:
        """The most tokens that the target has still to read of a prompt."""
        pairs = zip(self.text.counts, self.reader.read, strict=True)
        return max(count - 1 - read for count, read in pairs)

    @cached_property
    def last(self) -> frozenset[int]:
        """The rows that have room for one more token: nothing that is drafted for them could become text."""
        counts, endings = self.text.counts, self.endings
        return frozenset(row for row in self.going if endings[row].is_last(counts[row]))


def decode(method: Method, prompts: Prompts) -> Iterator[Block]:
    """Continue every prompt until its row ends; the output law is the target's, whatever is drafted.

    Raises:
        ContextOverflow: a prompt leaves no room.
        InvalidProbabilities: the target's logits are NaN or infinite.
        UnpairedScheme: the drafter cannot draft under the verifier's scheme.
    """
    rows = begin(method, prompts, capacity_for(method, prompts.endings))
    while rows.going:
        rows, block = step(method, rows)
        yield block


def capacity_for(method: Method, endings: Sequence[Ending]) -> int:
    """Return the key slots that the longest row and one step need."""
    return max(ending.max_length for ending in endings) + method.room


def room_for(ways: Sequence[tuple[Drafter, TreePolicy]]) -> int:
    """Return the key slots that a step needs beside a text's own, in a batch whose rows are drafted for in these ways.

    The largest tree of one row and the most riders of another lie in one pass.
    """
    return max(policy.largest.size for _, policy in ways) + max(drafter.riders for drafter, _ in ways) + 1


def begin(method: Method, prompts: Prompts, capacity: int, past: Past | None = None) -> Rows:
    """Start on prompts and read them; errors are those of `decode`, and of `check_keys` if there is a past.

    A model whose tokens depend on others of their pass reads a prompt as Hugging Face's `generate` does, in one pass:
    that of the first step.
    """
    rows = opened(method, prompts, capacity, past)
    if past:
        check_keys(rows.reader, rows.text)
    return read_on(rows, clock=method.clock) if getattr(method.target, "crowded", None) is None else rows


@torch.inference_mode()
def opened(method: Method, prompts: Prompts, capacity: int, past: Past | None = None, room: int | None = None) -> Rows:
    """Return the rows of prompts of which nothing is read yet, but for what a past of a single row knows of them.

    The past stays as it is. Rows that are to join a batch need key slots of the target for the prompt alone, which
    `room` says; their drafter's state has the whole capacity, for it may be a part by itself.
    """
    check_room(prompts.text, prompts.endings)
    method.drafter.check(method.verifier.scheme)
    text, laws, sources = _with_room(prompts.text, room or capacity), tuple(prompts.laws), prompts.sources
    batch = len(text.lengths)
    reader = reader_of(method.target, batch, room or capacity, method.drafter.reads, sources)
    known = past.known(text, method.drafter) if past else 0
    if past and known:
        reader = reader.put(0, past.reader.cut(0, known))
    session = Session(laws[0].params, capacity, method.target.vocab_size, reader, LOOP, sources)
    drafts = past.drafts if past else None
    with method.clock.charge("prefill"):
        noise = prompts.noise.keyed([method.drafter.outside(row) for row in range(batch)])
        state = resumed(method.drafter, drafts, 0 if drafts is None else known, text, session)
    own = (method.policy, laws[0].params)
    part = Part(method.drafter, method.verifier, method.policy, state, tuple(range(batch)), *own)
    going = frozenset(range(batch))
    return Rows(text, laws, tuple(prompts.endings), noise, (0,) * batch, going, reader, (part,))


@torch.inference_mode()
def read_on(rows: Rows, at_most: int | None = None, clock: Clock = UNTIMED) -> Rows:
    """Read prompts but for their last tokens, which are the first trees' roots; or only so many tokens of each."""
    with clock.charge("prefill"):
        reader, features = rows.reader.catch_up(rows.text, at_most)
    seen = rows.text if at_most is None else Text(rows.text.tokens, rows.text.lengths.new_tensor(reader.read) + 1)
    parts = tuple(part.read(seen, features, clock) if part.is_to_read else part for part in rows.parts)
    return replace(rows, reader=reader, parts=parts)


def step(method: Method, rows: Rows) -> tuple[Rows, Block]:
    """Draft, score, verify and commit once, for all rows; `full_step` without what the drafters learn from."""
    after, block, _ = full_step(method, rows)
    return after, block


@torch.inference_mode()
def full_step(method: Method, rows: Rows) -> tuple[Rows, Block, Step]:
    """Draft, score, verify and commit once, for all rows.

    A step that was interrupted may be taken again with the same rows, and is the same step: its random numbers follow
    from the rows' seeds and steps, and until it returns it writes only where nothing was committed yet.
    """
    text, fresh, clock = rows.text, rows.noise.at(rows.steps, rows.text.lengths), method.clock
    drafts = [part.drafted(text, rows.reader, fresh, rows.last, clock) for part in rows.parts]
    pieces = [piece for own, _ in drafts for piece in own]
    tree = stacked_tree(scored_trees(pieces, method.target.vocab_size))
    with clock.charge("target"):
        scored, reader = rows.reader.score(text, tree, beside(pieces, tree, method.target.vocab_size))
    target, verdict, told = _verified(rows, drafts, tree, scored, fresh, clock)
    lost = [row for row in sorted(rows.going) if not told[row][0]] if can_branch(method.target) else []
    if lost and tree.tokens.shape[1] > 1:  # drafts whose keys are no numbers spoil what does not even see them
        scored = _with_plain_roots(rows, scored, lost)
        target, again, _ = _verified(rows, drafts, tree, scored, fresh, clock)
        others = [row for row in range(len(rows.steps)) if row not in lost]  # whose numbers were drawn before
        both = [(tuple(own), one.of(own)) for own, one in ((lost, again), (others, verdict)) if own]
        verdict, told = told_of(tree, joint(both), target.usable, rows.going)
    gains = _with_sources(_emissions(told, rows, target.scores), drafts)
    chosen_by = Block(gains, tree, verdict, scored.logits, target.scores) if method.keeps_scores else None
    gains, verdict = in_step(rows.endings, gains, verdict, tree, text.counts, scores_of(chosen_by, rows.laws))
    taken = Step(text, tree, scored, target.probs, verdict)
    if method.logprobs is not None:
        gains = with_logprobs(gains, verdict, scored.logits, method.logprobs)
    extended, over = _extended(text, gains), {row for row, gained in gains.items() if gained.finish}
    after = replace(
        rows,
        text=extended,
        laws=target.laws_after(rows.laws, verdict),
        steps=tuple(count + 1 for count in rows.steps),
        going=rows.going - over,
        reader=reader.keep(text, verdict, ends=[count - 1 for count in extended.counts]),
        parts=tuple(part.committed(taken, own, clock).finished(extended, over, clock) for own, part in drafts),
    )
    kept = (scored.logits, target.scores) if method.keeps_scores else (None, None)
    block = Block(gains, tree, verdict, *kept)
    if method.teaches:
        own = [_under(policy, drafts) for policy in method.teaches]
        told = {row: gained for row, gained in gains.items() if row not in rows.last}
        block = replace(block, lessons=tuple(lessons_of(one, target.probs, verdict, told, rows.laws) for one in own))
    return after, block, taken


def _verified(
    rows: Rows,
    drafts: Sequence[tuple[Sequence[Piece], Part]],
    tree: TokenTree,
    scored: Scored,
    noise: Noise,
    clock: Clock,
) -> tuple[TargetRows, Verdict, list[list[int]]]:
    """Return the target's rows, what is kept of the drafts, and what is told of that; see `told_of`."""
    target = target_rows(rows.laws, scored.logits, tree, rows.text, rows.going)
    with clock.charge("verify"):
        verdict = joint(
            [
                one
                for own, part in drafts
                for one in verdicts(part.verifier, own, rows.last, rows.text, target.probs, noise)
            ]
        )
    return target, *told_of(tree, verdict, target.usable, rows.going)


def _with_plain_roots(rows: Rows, scored: Scored, lost: Sequence[int]) -> Scored:
    """Score the roots of some rows again, each without its tree, and put what comes in the place of what was there."""
    for row in lost:
        text = rows.text.of([row])
        plain, _ = rows.reader.select([row]).score(text, TokenTree.root_only(text.last()))
        pairs = ((scored.logits, plain.logits), *((scored.nodes[name], plain.nodes[name]) for name in plain.nodes))
        for whole, own in pairs:
            whole[row, 0] = own[0, 0]
    return scored


def _under(policy: TreePolicy, drafts: Sequence[tuple[Sequence[Piece], Part]]) -> list[tuple[Piece, TreeVerifier]]:
    """Return the drafts whose trees a policy chose, each with its verifier."""
    return [(piece, part.verifier) for pieces, part in drafts for piece in pieces if part.origin is policy]


def check_room(prompt: Text, endings: Sequence[Ending]) -> None:
    """Check that every prompt has a token and leaves room for one.

    Raises:
        ContextOverflow: a prompt is empty, or as long as its limit.
    """
    for length, ending in zip(prompt.lengths.tolist(), endings, strict=True):
        most = ending.max_length
        if length < 1:
            raise ContextOverflow("The prompt is empty: give at least one token.")
        if length >= most:
            raise ContextOverflow(f"The prompt has {length} tokens, but at most {most} fit, one of them new.")


def _with_room(prompt: Text, capacity: int) -> Text:
    tokens = prompt.tokens.new_zeros(len(prompt.lengths), capacity)
    tokens[:, : prompt.tokens.shape[1]] = prompt.tokens[:, :capacity]
    return Text(tokens, prompt.lengths.clone())


def _emissions(told: Sequence[Sequence[int]], rows: Rows, scores: Float[Tensor, "b n V"]) -> dict[int, Emission]:
    """Cut each unfinished row's gain at its end, given what was told of the verdict.

    Raises:
        InvalidProbabilities: the logits behind the text of a row that has not ended are not usable.
    """
    for row in rows.going:
        if not told[row][0]:
            to_probs(scores[row, 0], rows.laws[row].params)  # which raises, and says why
    lengths = rows.text.counts
    gains: dict[int, Emission] = {}
    for row in sorted(rows.going):
        _, kept, drafts, more, *tokens = told[row]
        past = rows.text.tokens[row, : lengths[row]]
        gains[row] = rows.endings[row].cut(past, tokens[: kept + 1], kept, drafts, bool(more))
    return gains


def _with_sources(gains: dict[int, Emission], drafts: Sequence[tuple[Sequence[Piece], Part]]) -> dict[int, Emission]:
    """Say of each gain who drafted, if somebody did, and by which rule it was verified."""
    named = ((piece, piece.draft.source or part.drafter.own_name, part) for pieces, part in drafts for piece in pieces)
    names = {row: (name, part.verifier) for piece, name, part in named for row in piece.rows}
    told = ((row, one, *names[row]) for row, one in gains.items())
    return {
        row: replace(one, source=name if one.drafted else "", verifier=rule.name, lossless=rule.lossless)
        for row, one, name, rule in told
    }


def _extended(text: Text, rows: dict[int, Emission]) -> Text:
    counts, device = [*text.counts], text.tokens.device
    for row, gained in rows.items():
        first, counts[row] = counts[row], counts[row] + len(gained.tokens)
        new: Int[Tensor, " s"] = torch.tensor(gained.tokens)
        text.tokens[row, first : counts[row]] = sent(new, device)
    after = Text(text.tokens, sent(torch.tensor(counts), device))
    vars(after)["counts"] = tuple(counts)  # else they would be read back
    return after


@dataclass(frozen=True, eq=False)
class Decoding:
    """A decode loop as a value."""

    method: Method
    rows: Rows

    @property
    def part(self) -> Part:
        """What drafts, for all rows."""
        (part,) = self.rows.parts
        return part

    def select(self, rows: Sequence[int]) -> "Decoding":
        """Return the loop over one row, over the same keys."""
        (row,), own, part = rows, self.rows, self.part
        alone = Rows(
            text=own.text.of([row]),
            laws=(own.laws[row],),
            endings=(own.endings[row],),
            noise=own.noise.of([row]),
            steps=(own.steps[row],),
            going=frozenset({0}),
            reader=own.reader.select([row]),
            parts=(replace(part, state=part.drafter.of_row(part.state, part.rows.index(row)), rows=(0,), alone=True),),
        )
        return replace(self, rows=alone)

    def put(self, row: int, other: "Decoding") -> "Decoding":
        """Put the only row of another loop in place of a row, or behind the last; it takes on this loop's room."""
        rows = joined(self.rows, row, other.rows)
        return replace(self, rows=replace(rows, endings=_replaced(rows.endings, row, self.rows.endings[0])))

    def cut(self, row: int, length: int) -> "Decoding":
        """Forget a row's text beyond its first `length` tokens."""
        parts = tuple(part.rewound(row, length) for part in self.rows.parts)
        return replace(self, rows=replace(self.rows, reader=self.rows.reader.cut(row, length), parts=parts))

    def reuse(self, fresh: "Decoding", length: int) -> "Decoding":
        """Return what another loop over one row, which is fresh, may keep of this one (`polydraft.rows.reuse`)."""
        reader = self.rows.reader.cut(0, length)
        drafts = reuse(self.part.state, fresh.part.state, length)
        return replace(self, rows=replace(self.rows, reader=reader, parts=(replace(self.part, state=drafts),)))


class Loop:
    """The decode loop, for drafters that decode with a model of their own (`drafters.Decoder`)."""

    def begin(
        self,
        model: LanguageModel,
        drafter: Drafter,
        verifier: TreeVerifier,
        policy: TreePolicy,
        text: Text,
        session: Session,
    ) -> Decoding:
        """Return a loop over a text of which nothing was read."""
        method, batch = Method(model, drafter, verifier, policy), len(text.lengths)
        laws = (TargetLaw(session.params),) * batch
        endings = (Ending(max_length=session.capacity),) * batch
        prompts = Prompts(text, laws, endings, Noise.from_seed(0, batch))
        return Decoding(method, opened(method, prompts, session.capacity + method.room))

    def on(self, state: Decoding, text: Text, noise: Noise) -> Decoding:
        """Return the loop over a text that agrees with its own up to what was committed, with fresh noise."""
        batch = len(text.lengths)
        fresh = replace(
            state.rows,
            text=_with_room(text, state.rows.text.tokens.shape[1]),
            noise=noise,
            steps=(0,) * batch,
            going=frozenset(range(batch)),
        )
        return replace(state, rows=fresh)

    def read(self, state: Decoding, text: Text) -> Decoding:
        """Read a text but for its last tokens."""
        own = _with_room(text, state.rows.text.tokens.shape[1])
        return replace(state, rows=read_on(replace(state.rows, text=own)))

    def step(self, state: Decoding) -> tuple[Decoding, Step]:
        """Take a step in all rows."""
        rows, _, taken = full_step(state.method, state.rows)
        return replace(state, rows=rows), taken

    def drafts(self, state: Decoding) -> Any:
        """Return the state of the loop's drafter."""
        return state.part.state

    def drafting(self, state: Decoding, drafts: Any) -> Decoding:
        """Return the loop with another state of its drafter."""
        return replace(state, rows=replace(state.rows, parts=(replace(state.part, state=drafts),)))


LOOP = Loop()


@torch.inference_mode()
def joined(rows: Rows, row: int, alone: Rows, clock: Clock = UNTIMED) -> Rows:
    """Return a batch in which the only row of another takes the place of a row, or comes behind the last.

    What drafts for it comes with it.
    """
    length, behind = alone.text.counts[0], int(row == len(rows.steps))
    layers = tuple(dict.fromkeys((*rows.reader.layers, *alone.reader.layers)))
    tokens = torch.nn.functional.pad(rows.text.tokens, (0, 0, 0, 1)) if behind else rows.text.tokens
    lengths = torch.nn.functional.pad(rows.text.lengths, (0, behind))
    tokens[row, :length] = alone.text.tokens[0, :length]
    lengths[row] = length
    with clock.charge("prefill"):
        parts = parts_with(rows.parts, row, alone.parts[0])
    return Rows(
        text=Text(tokens, lengths),
        laws=_replaced(rows.laws, row, alone.laws[0]),
        endings=_replaced(rows.endings, row, alone.endings[0]),
        noise=rows.noise.joined(row, alone.noise),
        steps=_replaced(rows.steps, row, 0),
        going=rows.going | {row},
        reader=replace(rows.reader.put(row, alone.reader), layers=layers),
        parts=parts,
    )


def _replaced(values: tuple[Value, ...], place: int, value: Value) -> tuple[Value, ...]:
    return (*values[:place], value, *values[place + 1 :])
