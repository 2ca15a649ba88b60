"""Prompts: how a batch begins with them, and how they are read; and the loop for drafters that decode inside."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from polydraft.drafters import Drafter, Session, known_outside, resumed
from polydraft.engine.calls.past import Past, check_keys
from polydraft.engine.clock import UNTIMED, Clock
from polydraft.engine.loop.batch import Batch, Fault, Method, Part, faults_of
from polydraft.engine.loop.drafting import lent, reason_of
from polydraft.engine.loop.faults import row_by_row, settled
from polydraft.engine.loop.step import step
from polydraft.engine.stopping import Ending
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import ContextOverflow
from polydraft.models import LanguageModel
from polydraft.probs import Noise
from polydraft.reading import Features, Step, Text, reader_of
from polydraft.trees import MENDABLE, TreePolicy
from polydraft.verifiers import TreeVerifier


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

    The largest tree of one row and the most riders of another lie in one pass.
    """
    return max(one.policy.largest.size for one in methods) + max(one.drafter.needs.riders for one in methods) + 1


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
    room = capacity or capacity_for(method, prompts.endings)
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

    Raises:
        ContextOverflow: a prompt leaves no room.
        UnpairedScheme: the drafter cannot draft under the verifier's scheme.
    """
    check_room(prompts.text, prompts.endings)
    method.drafter.check(method.verifier.scheme)
    text, laws, sources = _with_room(prompts.text, room or capacity), tuple(prompts.laws), prompts.sources
    rows = len(text.lengths)
    reader = reader_of(target, rows, room or capacity, method.drafter.needs.layers, sources)
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
        model: LanguageModel,
        drafter: Drafter,
        verifier: TreeVerifier,
        policy: TreePolicy,
        text: Text,
        session: Session,
    ) -> Batch:
        """Return a loop over a text of which nothing was read."""
        method, batch = Method(drafter, verifier, policy), len(text.lengths)
        laws = (TargetLaw(session.params),) * batch
        endings = (Ending(max_length=session.capacity),) * batch
        prompts = Prompts(text, laws, endings, Noise.from_seed(0, batch))
        return opened(model, method, prompts, session.capacity + room_for([method]), mends=False)

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
