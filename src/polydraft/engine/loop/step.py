"""How a batch begins with prompts and takes a step: draft, score, verify, keep the accepted path."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.drafters import Drafter, Session, finished, known_outside, resumed
from polydraft.engine.emission import UNTIMED, Block, Clock, Emission
from polydraft.engine.loop.batch import Batch, Fault, Method, Part, faults_of, in_sight
from polydraft.engine.loop.drafting import (
    Drafted,
    RowVerdict,
    beside,
    drafted,
    emissions,
    joint,
    known_tokens,
    lent,
    place_of_verifying,
    proposed,
    reason_of,
    request_of,
    riders_of,
    told_of,
    told_what_was_kept,
    verdicts,
)
from polydraft.engine.loop.faults import NO_LAW, committed_apart, drafted_apart, row_by_row, settled, without_rows
from polydraft.engine.loop.forced import MOST_FORCED, Forced, followed, forced_behind
from polydraft.engine.output import Past, check_keys, emitted_rows
from polydraft.engine.target_law import Ending, TargetLaw, TargetRows, in_step, target_rows
from polydraft.errors import ContextOverflow
from polydraft.models import LanguageModel
from polydraft.probs import Noise, sent
from polydraft.reading import Features, KeylessReader, Reader, Scored, Step, Text, reader_of
from polydraft.trees import MENDABLE, Piece, TokenTree, TreePolicy, Verdict, stacked_tree
from polydraft.verifiers import TreeVerifier


@dataclass(frozen=True, eq=False)
class Taken:
    """What those need who are told of a step behind it: planners, log-probabilities, whoever keeps scores.

    Args:
        step: what was scored, and what was kept of it.
        drafts: the drafts, each with the method whose they are.
        scores: the target's scores, before temperature and filters.
        laws: the rows' laws before the step.
        last: the rows for which nothing was drafted, since one token was left.
    """

    step: Step
    drafts: tuple[tuple[Method, Piece], ...]
    scores: Float[Tensor, "b n V"]
    laws: tuple[TargetLaw, ...]
    last: frozenset[int]


@torch.inference_mode()
def step(batch: Batch, clock: Clock = UNTIMED, *, mends: bool = True) -> tuple[Batch, Block, Taken]:
    """Draft, score, verify and commit once, for all rows; the output law is the target's, whatever is drafted.

    A step that was interrupted may be taken again with the same batch, and is the same step: its random numbers follow
    from the rows' seeds and steps, and until it returns it writes only where nothing was committed yet.

    Args:
        batch: the rows.
        clock: what the parts of the step are charged to.
        mends: whether rows go on without drafts where a drafter fails (`faults`); else its errors are raised.

    Raises:
        InvalidProbabilities: the logits behind the text of a row that has not ended are not usable.
    """
    text, vocab = batch.text, batch.reader.model.facts.vocab_size
    fresh = batch.noise.at(batch.steps, text.lengths)
    asked = [_asked(part, batch, fresh, clock, mends) for part in batch.parts]
    drafts = [(one.before.method, piece) for found, _ in asked for one in found for piece in one.pieces]
    pieces = [piece for _, piece in drafts]
    tree, ahead = stacked_tree([(piece.rows, known_tokens(piece.draft, vocab)) for piece in pieces]), None
    if any(map(attrgetter("processors"), batch.laws)) and (ahead := forced_behind(tree, batch, riders_of(pieces))):
        tree = ahead.tree
    with clock.charge("target"):
        scored, reader = batch.reader.score(text, tree, beside(pieces, tree, vocab))
    target, verdict, told = _verified(batch, drafts, tree, scored, fresh, clock, ahead)
    lost = [row for row in sorted(batch.going) if not told[row].usable] if batch.reader.model.facts.branches else []
    beside_root = tree.tokens.shape[1] > 1 or scored.riders is not None
    if lost and beside_root:  # drafts whose keys are no numbers spoil what does not even see them
        scored = _with_plain_roots(batch, scored, lost)
        target, again, _ = _verified(batch, drafts, tree, scored, fresh, clock, ahead)
        others = [row for row in range(len(batch)) if row not in lost]  # whose numbers were drawn before
        both = [(tuple(own), one.of(own)) for own, one in ((lost, again), (others, verdict)) if own]
        verdict, told = told_of(tree, joint(both), target.usable, batch.going)
        told = told if ahead is None else ahead.told(verdict, told)
    verdict = verdict.on(tree.tokens.device)
    gains = emissions(told, drafts, batch, target.scores)
    chosen_by = Block(gains, tree, verdict, scored.logits, target.scores)
    gains, verdict = in_step(batch.endings, chosen_by, text.counts, lambda: emitted_rows(chosen_by, batch.laws))
    taken = Step(text, tree, scored, target.probs, verdict)
    if ahead is not None:
        taken = replace(taken, verdict=ahead.own(verdict), whole=verdict)
    extended, over = _extended(text, gains), frozenset(row for row, gained in gains.items() if gained.finish)
    kept = [_kept(found, said, batch, fresh, taken, (extended, over), clock, mends) for found, said in asked]
    after = replace(
        batch,
        text=extended,
        laws=target.laws_after(batch.laws, verdict),
        steps=tuple(count + 1 for count in batch.steps),
        going=batch.going - over,
        reader=reader.keep(text, verdict, ends=[count - 1 for count in extended.counts]),
        parts=tuple(part for parts, _ in kept for part in parts),
        faults=(),
    )
    failures = [(part.method, reason) for part, (_, reason) in zip(batch.parts, kept, strict=True) if reason]
    block = Block(gains, tree, verdict, faults=(*batch.faults, *faults_of(failures, after.parts)))
    return after, block, Taken(taken, tuple(drafts), target.scores, batch.laws, batch.last)


def _asked(part: Part, batch: Batch, noise: Noise, clock: Clock, mends: bool) -> tuple[list[Drafted], str]:
    """Return what came of asking a part for its drafts, and what is told of an error; "" for nothing."""
    if not mends:
        draft, state = proposed(part, request_of(part, batch, noise), batch, clock)
        return [Drafted(part, replace(part, state=state), draft, batch.text.last())], ""
    one = drafted(part, batch, noise, clock)
    return ([one], "") if one.error is None else drafted_apart(one, batch, noise, clock)


def _kept(
    found: Sequence[Drafted],
    told: str,
    batch: Batch,
    noise: Noise,
    step: Step,
    written: tuple[Text, frozenset[int]],
    clock: Clock,
    mends: bool,
) -> tuple[list[Part], str]:
    """Return what becomes of a part with a step, and what is told of errors in it; "" for nothing.

    Args:
        found: what came of asking it.
        told: what is told of errors so far.
        batch, noise, step, clock, mends: of the step.
        written: the text behind the step, and the rows that ended with it.
    """
    parts = list[Part]()
    for one in found:
        after, error = _committed(one, batch, noise, step, clock, mends)
        parts, told = [*parts, *after], told or error
    parts, errors = settled(parts, len(batch)) if len(parts) > 1 else parts, list[str]()
    done = [_finished(part, *written, errors, clock, mends) for part in parts]
    told = told or next(iter(errors), "")
    return [own for part in done for own in in_sight(part, len(batch))], told


def _committed(
    one: Drafted, batch: Batch, noise: Noise, step: Step, clock: Clock, mends: bool
) -> tuple[list[Part], str]:
    """Tell a part what was kept of its drafts.

    A draft row that is no law is an error of its text, behind the step in which what was drawn beside and above it is
    verified.
    """
    if one.after.fault:
        return [one.after], ""
    if not mends:
        return [told_what_was_kept(one, step, clock)], ""
    unsound, told = one.unsound(), ""
    try:
        found = [told_what_was_kept(one, step, clock)]
    except MENDABLE:
        raise
    except Exception as error:  # noqa: BLE001  whatever a drafter does wrong must not lose the text
        found, told = committed_apart(one, batch, noise, step, error, clock), reason_of(error)
    if not unsound:
        return found, told
    reason = f"InvalidProbabilities: {NO_LAW}"
    return without_rows(found, unsound, reason), reason


def _finished(part: Part, text: Text, over: frozenset[int], errors: list[str], clock: Clock, mends: bool) -> Part:
    """Tell the drafter which texts are over; an error there costs nothing, since nothing more is drafted for them."""
    for place in [place for place, row in enumerate(part.rows) if row in over and not part.fault]:
        own = lent(part.of(text, len(text.counts)), part.drafter)
        try:
            with clock.charge("draft", part.method):
                part = replace(part, state=finished(part.drafter, part.state, own, place))
        except MENDABLE:
            raise
        except Exception as error:
            if not mends:
                raise
            errors.append(reason_of(error))
    return part


def _verified(
    batch: Batch,
    drafts: Sequence[tuple[Method, Piece]],
    tree: TokenTree,
    scored: Scored,
    noise: Noise,
    clock: Clock,
    ahead: Forced | None,
) -> tuple[TargetRows, Verdict, list[RowVerdict]]:
    """Return the target's rows, what is kept of the drafts, and what is told of that; see `told_of`."""
    target = target_rows(batch.laws, scored.logits, tree, batch.text, batch.going)
    with clock.charge("verify"):
        place = place_of_verifying(target.probs)
        probs, found, rows = sent(target.probs, place), list[tuple[tuple[int, ...], Verdict]](), list[Tensor]()
        for method, piece in drafts:
            greedy_only = getattr(method.verifier, "greedy_only", False)
            rows.append(sent(target.softened, place) if greedy_only else probs)
            found += verdicts(method.verifier, piece, batch, rows[-1], noise)
        verdict = joint(found)
        verdict = verdict if ahead is None else followed(ahead, verdict, drafts, rows, batch, noise)
    verdict, told = told_of(tree, verdict, target.usable, batch.going)
    return target, verdict, told if ahead is None else ahead.told(verdict, told)


def _with_plain_roots(batch: Batch, scored: Scored, lost: Sequence[int]) -> Scored:
    """Score the roots of some rows again, each without its tree, and put what comes in the place of what was there."""
    for row in lost:
        text = batch.text.of([row])
        plain, _ = batch.reader.select([row]).score(text, TokenTree.root_only(text.last()))
        pairs = ((scored.logits, plain.logits), *((scored.nodes[name], plain.nodes[name]) for name in plain.nodes))
        for whole, own in pairs:
            whole[row, 0] = own[0, 0]
    return scored


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


def room_for(methods: Sequence[Method]) -> int:
    """Return the key slots that a step needs beside a text's own, in a batch whose rows have these methods.

    The largest tree of one row and the most riders of another lie in one pass; a view's slots are written before it.
    """
    sizes = [(one.policy.largest.size, one.drafter.needs.riders + one.drafter.needs.slots) for one in methods]
    return sum(map(max, zip(*sizes, strict=True))) + 1


def capacity_for(method: Method, endings: Sequence[Ending]) -> int:
    """Return the key slots that the longest row and one step need."""
    return max(ending.max_length for ending in endings) + room_for([method])


def begin(
    target: LanguageModel,
    method: Method,
    prompts: Prompts,
    *,
    capacity: int | None = None,
    past: Past | None = None,
    fault: str = "",
    clock: Clock = UNTIMED,
) -> Batch:
    """Start on prompts and read them; see `opened`. Errors are also those of `check_keys` if there is a past.

    A model whose tokens depend on others of their pass reads a prompt as Hugging Face's `generate` does, in one pass:
    that of the first step.
    """
    spare = MOST_FORCED * any(map(attrgetter("processors"), prompts.laws))
    room = capacity or capacity_for(method, prompts.endings) + spare
    batch = opened(target, method, prompts, room, past=past, fault=fault, clock=clock)
    if past:
        check_keys(batch.reader, batch.text)
    return read_on(batch, clock=clock) if getattr(target, "crowded", None) is None else batch


@torch.inference_mode()
def opened(
    target: LanguageModel,
    method: Method,
    prompts: Prompts,
    capacity: int,
    *,
    past: Past | None = None,
    room: int | None = None,
    fault: str = "",
    clock: Clock = UNTIMED,
    mends: bool = True,
    keys: Reader | None = None,
) -> Batch:
    """Return the rows of prompts of which nothing is read yet, but for what a past of a single row knows of them.

    The past stays as it is.

    Args:
        target: the model whose law the texts follow.
        method: what drafts for them and verifies.
        prompts: the prompts.
        capacity: key slots of a row, for the longest text and one step.
        past: what is known of how the only prompt begins.
        room: the target's key slots; those of rows that are to join a batch need room for the prompt alone. Their
            drafter's state has the whole capacity, for it may be a part by itself.
        fault: why nothing is to be drafted; empty if something is.
        clock: what is charged for prompts.
        mends: whether rows go on without drafts if the drafter fails.
        keys: who reads the text; None for a reader of its own.

    Raises:
        ContextOverflow: a prompt leaves no room.
        UnpairedScheme: the drafter cannot draft under the verifier's scheme.
    """
    check_room(prompts.text, prompts.endings)
    method.drafter.check(method.verifier.scheme)
    text, laws, sources = _with_room(prompts.text, room or capacity), tuple(prompts.laws), prompts.sources
    rows = len(text.lengths)
    needs = method.drafter.needs
    reader = keys or reader_of(target, rows, room or capacity, needs.layers, sources, needs.queries)
    known = past.known(text, method.drafter) if past else 0
    if past and known:
        reader = reader.put(0, past.reader.cut(0, known))
    session = Session(laws[0].params, capacity, target.facts.vocab_size, reader, LOOP, sources)
    part, faults = Part(method, laws[0].params, method.policy, None, tuple(range(rows)), fault), tuple[Fault, ...]()
    noise = prompts.noise
    try:
        if not fault:
            with clock.charge("prefill"):
                noise = noise.keyed([known_outside(method.drafter, row) for row in range(rows)])
                drafts = past.drafts if past else None
                state = resumed(
                    method.drafter, drafts, 0 if drafts is None else known, lent(text, method.drafter), session
                )
                part = replace(part, state=state)
    except MENDABLE:
        raise
    except Exception as error:
        if not mends:
            raise
        part = part.failed(reason_of(error))
        faults = (Fault(method, part.fault, every=True),)
    going, endings = frozenset(range(rows)), tuple(prompts.endings)
    return Batch(text, laws, endings, noise, (0,) * rows, going, reader, (part,), faults)


@torch.inference_mode()
def read_on(batch: Batch, at_most: int | None = None, clock: Clock = UNTIMED, *, mends: bool = True) -> Batch:
    """Read prompts but for their last tokens, which are the first trees' roots; or only so many tokens of each."""
    with clock.charge("prefill"):
        reader, features = batch.reader.catch_up(batch.text, at_most)
    seen = batch.text if at_most is None else Text(batch.text.tokens, batch.text.lengths.new_tensor(reader.read) + 1)
    parts, told = list[Part](), list[tuple[Method, str]]()
    for part in batch.parts:
        try:
            parts.append(_read(part, seen, features, clock))
        except MENDABLE:
            raise
        except Exception as error:
            if not mends:
                raise
            found = row_by_row(part, lambda own: _read(own, seen, features, clock), error)
            told.append((part.method, reason_of(error)))
            parts += settled(found, len(batch))
    return replace(batch, reader=reader, parts=tuple(parts), faults=(*batch.faults, *faults_of(told, parts)))


def _read(part: Part, seen: Text, features: Features | None, clock: Clock) -> Part:
    """Let a drafter read prompts; see `Drafter.read`."""
    if not part.reads_prompts:
        return part
    rows = len(seen.counts)
    with clock.charge("prefill"):
        text = lent(part.of(seen, rows), part.drafter)
        return replace(part, state=part.drafter.read(part.state, text, part.of(features, rows)))


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


class Loop:
    """The decode loop, for drafters that decode with a model of their own (`drafters.Decoder`); its state is a batch.

    An error of what drafts inside is the outer drafter's own, unless a step mends it.
    """

    def begin(
        self,
        model: LanguageModel | Reader,
        drafter: Drafter,
        verifier: TreeVerifier,
        policy: TreePolicy,
        text: Text,
        session: Session,
    ) -> Batch:
        """Return a loop over a text of which nothing was read; where keys are lent there are as many slots as these."""
        method, batch = Method(drafter, verifier, policy), len(text.lengths)
        keys = KeylessReader.like(model) if isinstance(model, Reader) else None
        longest = session.capacity if keys is None else session.capacity - room_for([method])
        laws = (TargetLaw(session.params),) * batch
        prompts = Prompts(text, laws, (Ending(max_length=longest),) * batch, Noise.from_seed(0, batch))
        model = model.model if isinstance(model, Reader) else model
        return opened(model, method, prompts, longest + room_for([method]), mends=False, keys=keys)

    def lent(self, state: Batch, reader: Reader | None) -> Batch:
        """Return the loop over a reader's keys; None gives them back."""
        return replace(state, reader=KeylessReader.like(state.reader) if reader is None else reader)

    def on(self, state: Batch, text: Text, noise: Noise) -> Batch:
        """Return the loop over a text that agrees with its own up to what was committed, with fresh noise."""
        batch, room = len(text.lengths), state.text.tokens.shape[1]
        ending = Ending(max_length=room - room_for([part.method for part in state.parts]))
        return replace(
            state,
            text=_with_room(text, room),
            noise=noise.inside(),
            endings=(ending,) * batch,
            steps=(0,) * batch,
            going=frozenset(range(batch)),
        )

    def read(self, state: Batch, text: Text) -> Batch:
        """Read a text but for its last tokens."""
        return read_on(replace(state, text=_with_room(text, state.text.tokens.shape[1])), mends=False)

    def step(self, state: Batch, *, mends: bool = False) -> tuple[Batch, Step]:
        """Take a step in all rows; rows go on without drafts where those inside fail, with a warning, if it `mends`."""
        after, block, taken = step(state, mends=mends)
        for fault in block.faults:
            said = f"The {fault.method.drafter.name} drafter inside a loop failed ({fault.reason}); it goes on without."
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return after, taken.step

    def drafts(self, state: Batch) -> Any:
        """Return the state of the loop's drafter."""
        (part,) = state.parts
        return part.state

    def drafting(self, state: Batch, drafts: Any) -> Batch:
        """Return the loop with another state of its drafter."""
        (part,) = state.parts
        return replace(state, parts=(replace(part, state=drafts),))


LOOP = Loop()
