"""Joining, of caches, states and loops: a text that takes a row's place is what it is alone, and disturbs nobody."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from doubles import TREE_KINDS, plain_logits, step_of, tiny_model
from torch import Tensor

from polydraft.drafters import (
    Drafter,
    DraftRequest,
    EnsembleDrafter,
    JacobiBlockDrafter,
    JacobiDrafter,
    LookaheadDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    ParallelDrafter,
    Session,
)
from polydraft.engine.loop.step import LOOP
from polydraft.errors import UnsupportedModel
from polydraft.models import Cache, HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.rows import put
from polydraft.schemes import IID, Coupled, Given, Product, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Chain, Draft, Fixed, TreePolicy, TreeShape, Verdict, causal_mask, tree_mask
from polydraft.verifiers import NaiveMatch, TopDown, TreeVerifier

VOCAB, WIDTH, CAPACITY = 20, 48, 60
PARAMS = SamplingParams(temperature=0.9)
BRANCHING = Fixed(TreeShape(((3,), (2, 0, 1), (1,))))
ROWS = [[3, 1, 4, 3, 1], [7], [5, 8, 5, 8, 5, 8]]
NEWCOMERS = {"longer": [2, 7, 1, 2, 8, 1, 8, 2, 8, 4, 2, 7], "two tokens": [9, 9], "one token": [6]}
ROW = 1


@cache
def model(kind: str, vocab: int = VOCAB) -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model(kind, vocab))


def ensemble() -> EnsembleDrafter:
    return EnsembleDrafter(((model("llama"), None), (model("qwen2", VOCAB + 6), SamplingParams(temperature=1.5))))


MEMBERS: dict[str, tuple[Callable[[], Drafter], tuple[Scheme, ...]]] = {
    "none": (NoDraft, (TopK(),)),
    "n-gram": (NgramDrafter, (Given(),)),
    "jacobi": (JacobiDrafter, (Given(),)),
    "lookahead": (lambda: LookaheadDrafter(3, 4, 3, pool_from_prompt=True), (Given(),)),
    "ouroboros": (lambda: OuroborosDrafter(model("llama"), 2, 3, 3, 4, 3), (Given(),)),
    "model": (
        lambda: ModelDrafter(model("llama"), shortlist_size=8),
        (IID(), WithoutReplacement(), TopK(), TopThenSample(), Coupled(), Product()),
    ),
    "padded model": (lambda: ModelDrafter(model("qwen2", VOCAB + 6)), (WithoutReplacement(),)),
    "pard": (lambda: ParallelDrafter(model("llama", VOCAB + 1), VOCAB), (IID(), TopK())),
    "guesses": (lambda: JacobiBlockDrafter(model("llama"), 6), (IID(), TopK())),
    "ensemble": (ensemble, (Product(),)),
}
PAIRED = [(name, scheme) for name, (_, schemes) in MEMBERS.items() for scheme in schemes]
each_pair = pytest.mark.parametrize(("member", "scheme"), PAIRED, ids=lambda one: getattr(one, "name", one))
each_newcomer = pytest.mark.parametrize("newcomer", NEWCOMERS.values(), ids=[*NEWCOMERS])


def text_of(rows: list[list[int]]) -> Text:
    tokens = torch.zeros(len(rows), WIDTH, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def noise_of(names: list[int], step: int) -> Noise:
    """Return streams that belong to texts, whatever row they are in."""
    streams = [Noise.from_seed(100 + name, 1).at(step).generators[0] for name in names]
    return Noise(tuple(streams), tuple(names))


class Play:
    """A drafter, its state, and the texts of a batch that is drafted for and that accepts first children."""

    def __init__(
        self, drafter: Drafter, rows: list[list[int]], names: list[int], capacity: int = CAPACITY, reads: bool = True
    ) -> None:
        self.drafter = drafter
        self.rows, self.names = [list(row) for row in rows], list(names)
        state = drafter.start(text_of(rows), Session(PARAMS, capacity, VOCAB, decoder=LOOP))
        self.state: Any = drafter.read(state, text_of(rows), None) if reads else state

    def step(self, scheme: Scheme, number: int) -> Draft:
        """Draft, accept what every text wants, and return the draft."""
        policy: TreePolicy = Chain(3) if scheme == Given() else BRANCHING
        text = text_of(self.rows)
        draft, self.state = self.drafter.draft(
            self.state, DraftRequest(text, scheme, policy, noise_of(self.names, number))
        )
        path = torch.full((len(self.rows), draft.tree.topology.height), -1)
        for row, name in enumerate(self.names):
            kept = [int(draft.tree.children[row, 0, 0])] if path.shape[-1] and (name + number) % 2 else []
            kept = [node for node in kept if node >= 0]
            path[row, : len(kept)] = torch.tensor(kept)
            self.rows[row] += [*draft.tree.tokens[row, kept].tolist(), (3 * name + number) % VOCAB]
        verdict = Verdict(path, (path >= 0).sum(dim=-1), torch.tensor([row[-1] for row in self.rows]))
        self.state = self.drafter.commit(self.state, step_of(text, draft, verdict))
        return draft

    def join(self, row: int, other: "Play") -> None:
        self.state = put(self.state, row, other.state)
        self.rows[row : row + 1], self.names[row : row + 1] = [list(other.rows[0])], [other.names[0]]


def same(one: Draft, row: int, other: Draft, place: int) -> None:
    """Check that two rows of two drafts are the same tree with the same laws."""
    nodes = min(one.tree.tokens.shape[-1], other.tree.tokens.shape[-1])
    for draft, at in ((one, row), (other, place)):
        assert not bool(draft.tree.valid[at, nodes:].any()), "a neighbour's longer chain is padding here"
    there = one.tree.valid[row, :nodes]
    assert torch.equal(there, other.tree.valid[place, :nodes])
    assert one.tree.tokens[row, :nodes][there].tolist() == other.tree.tokens[place, :nodes][there].tolist()
    assert one.atoms[row, :nodes][there].tolist() == other.atoms[place, :nodes][there].tolist()
    drawn_from = one.probs[row, :nodes].flatten(1).sum(dim=-1) > 0
    listed, rows = one.shortlist[row, :nodes][drawn_from], one.probs[row, :nodes][drawn_from]
    assert torch.equal(listed, other.shortlist[place, :nodes][drawn_from])
    torch.testing.assert_close(rows, other.probs[place, :nodes][drawn_from], rtol=0, atol=1e-10)


@pytest.mark.long(26)
@each_pair
@each_newcomer
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("place", [ROW, len(ROWS)], ids=["in a row's place", "behind the last"])
@pytest.mark.parametrize("reads", [True, False], ids=["read", "unread"])
def test_a_joined_row_drafts_what_it_drafts_alone_and_the_others_what_they_did(
    member: str, scheme: Scheme, newcomer: list[int], before: int, place: int, reads: bool
):
    """The newcomer comes after some steps of the batch, with a state that has no room for more than its prompt."""
    drafter, others = MEMBERS[member][0](), [row for row in range(len(ROWS)) if row != place]
    joined, undisturbed = (Play(drafter, ROWS, [0, 1, 2]) for _ in range(2))
    for number in range(before):
        joined.step(scheme, number)
        undisturbed.step(scheme, number)
    joined.join(place, Play(drafter, [newcomer], [5], capacity=len(newcomer) + 1, reads=reads))
    alone = Play(drafter, [newcomer], [5])
    for number in range(before, before + 3):
        here, there, by_itself = (play.step(scheme, number) for play in (joined, undisturbed, alone))
        same(here, place, by_itself, 0)
        for row in others:
            same(here, row, there, row)
    assert joined.rows[place] == alone.rows[0]
    assert [joined.rows[row] for row in others] == [undisturbed.rows[row] for row in others]


def test_a_row_that_nobody_joined_is_caught():
    """What the other tests rest on: a state that kept the old row drafts something else."""
    drafter = MEMBERS["model"][0]()
    forgotten, alone = Play(drafter, ROWS, [0, 1, 2]), Play(drafter, [NEWCOMERS["longer"]], [5])
    forgotten.rows[0], forgotten.names[0] = list(NEWCOMERS["longer"]), 5
    with pytest.raises(AssertionError):
        same(forgotten.step(IID(), 0), 0, alone.step(IID(), 0), 0)


# Decode loops.


def greedy(prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(int(plain_logits(model("llama").model, text).argmax()))
    return text


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "last", "behind the last"])
@pytest.mark.parametrize("same_method", [True, False])
def test_a_row_joins_a_decode_loop(place: int, same_method: bool) -> None:
    """Every row goes on as alone, whether the newcomer's drafts are made by the batch's drafter or by another."""
    session = Session(SamplingParams(temperature=0), CAPACITY, VOCAB)
    drafter, verifier = ModelDrafter(model("qwen2")), TopDown(NaiveMatch(TopK()))
    other = (drafter, verifier) if same_method else (NgramDrafter(), TopDown(NaiveMatch(Given())))

    def begun(prompts: list[list[int]], drafter: Drafter, verifier: TreeVerifier) -> Any:
        state = LOOP.begin(model("llama"), drafter, verifier, policy, text_of(prompts), session)
        return LOOP.step(state)[0]

    policy, prompts = Chain(3), [[3, 1, 4, 3, 1], [7, 2]]
    state = begun(prompts, drafter, verifier).put(place, begun([[5, 8, 5, 8]], *other))
    prompts = [*prompts[:place], [5, 8, 5, 8], *prompts[place + 1 :]]
    assert len(state.parts) == (1 if same_method else 2)
    assert state.parts[0].covers(len(state)) == same_method
    for _ in range(3):
        state, taken = LOOP.step(state)
    text = state.text
    assert len(text.counts) == len(prompts) == len(taken.text.counts)
    for row, prompt in enumerate(prompts):
        assert text.counts[row] >= len(prompt) + 4
        assert text.tokens[row, : text.counts[row]].tolist() == greedy(prompt, text.counts[row])


# Caches.


def read(cache: Cache, kind: str, rows: list[list[int]]) -> None:
    """Score the rows but for their last tokens."""
    text = text_of(rows)
    width = int(text.lengths.max()) - 1
    if width:
        places = torch.arange(width).expand(len(rows), width)
        mask = causal_mask(text.lengths - 1, width)
        model(kind).forward(text.tokens[:, :width], places, mask, cache, torch.zeros_like(text.lengths))


def tree_logits(cache: Cache, kind: str, rows: list[list[int]]) -> Tensor:
    """Score the last token of each row and two tokens after it, one of them twice: a tree."""
    text = text_of(rows)
    base = text.lengths - 1
    tokens = torch.cat([text.last().unsqueeze(-1), torch.tensor([[4, 9, 11]]).expand(len(rows), 3)], dim=-1)
    ancestors = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool().expand(len(rows), 4, 4)
    mask = tree_mask(ancestors, base, int(base.max()) + 4)
    positions = base.unsqueeze(-1) + torch.tensor([0, 1, 1, 2])
    return model(kind).forward(tokens, positions, mask, cache, base).logits


@pytest.mark.parametrize("kind", TREE_KINDS)
@each_newcomer
@pytest.mark.parametrize("rows", [ROWS, [[3], [7], [5]]], ids=["texts", "nothing scored"])
def test_a_joined_row_of_a_cache_scores_what_it_scores_alone_and_the_others_what_they_did(
    kind: str, newcomer: list[int], rows: list[list[int]]
):
    batch, undisturbed = (model(kind).new_cache(len(rows), CAPACITY) for _ in range(2))
    narrow, alone = model(kind).new_cache(1, len(newcomer) + 1), model(kind).new_cache(1, CAPACITY)
    for one, texts in ((batch, rows), (undisturbed, rows), (narrow, [newcomer]), (alone, [newcomer])):
        read(one, kind, texts)
    batch.put(ROW, narrow, len(newcomer) - 1)
    after = [*rows[:ROW], newcomer, *rows[ROW + 1 :]]
    joined, there = tree_logits(batch, kind, after), tree_logits(undisturbed, kind, rows)
    torch.testing.assert_close(joined[ROW], tree_logits(alone, kind, [newcomer])[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(joined[[0, 2]], there[[0, 2]], rtol=0, atol=1e-10)
    path = torch.tensor([[1, 3], [2, -1], [-1, -1]])
    lengths = torch.tensor([len(row) for row in after]) - 1
    batch.keep(lengths, path)
    alone.keep(lengths[ROW : ROW + 1], path[ROW : ROW + 1])
    joined = tree_logits(batch, kind, [[*after[0], 4, 11, 1], [*newcomer, 9, 1], [*after[2], 1]])
    torch.testing.assert_close(joined[ROW], tree_logits(alone, kind, [[*newcomer, 9, 1]])[0], rtol=0, atol=1e-10)


def test_a_text_that_does_not_fit_is_refused():
    small, large = model("llama").new_cache(2, 6), model("llama").new_cache(1, CAPACITY)
    read(large, "llama", [NEWCOMERS["longer"]])
    with pytest.raises(UnsupportedModel, match="has 6 slots, but 11 are needed"):
        small.put(ROW, large, 11)
