"""One suite over all drafters: whatever they propose is a tree that the engine and the verifiers can work with."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from doubles import step_of, tiny_model
from heads import WIDTH, every_head
from sources import encoder_decoder

from polydraft.catalogue import DrafterLine, every_scheme, tables
from polydraft.drafters import (
    Drafter,
    DraftRequest,
    JacobiBlockDrafter,
    LookupFirst,
    ModelDrafter,
    ParallelDrafter,
    RiderDrafter,
    Session,
    SpecDrafter,
    StoreVocabulary,
    StoreWriter,
    TextStore,
)
from polydraft.engine.loop.step import LOOP
from polydraft.errors import UnpairedScheme
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text
from polydraft.schemes import Coupled, Scheme, SpecHub, TopThenIID
from polydraft.trees import (
    EAGLE_25,
    Chain,
    Draft,
    Fixed,
    Pieces,
    TokenTree,
    TreePolicy,
    Verdict,
    Widths,
    in_pieces,
    stacked_tree,
)

VOCAB = 20
ROWS = [[3, 1, 4, 3, 1], [7], [5, 8, 5, 8, 5, 8], [2, 7, 1]]
EVERY = tuple(scheme for scheme in every_scheme() if not isinstance(scheme, SpecHub | TopThenIID | Coupled))
"""All but those that draft as others do, with few drafts or shared noise."""


def model_drafter(family: str = "llama", vocab: int = VOCAB) -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(tiny_model(family, vocab)), shortlist_size=8)


@cache
def store() -> TextStore:
    """Return a store with what follows some of the rows."""
    folder = TemporaryDirectory()
    weakref.finalize(store, folder.cleanup)
    with StoreWriter(folder.name, StoreVocabulary(VOCAB)) as writer:
        for text in ([3, 1, 5, 6, 7], [3, 1, 5, 8], [5, 8, 2], [7, 1, 4, 4, 9], list(range(VOCAB))):
            writer.add(text)
    return TextStore(folder.name)


def member(line: DrafterLine) -> Drafter:
    """Return a drafter of a line, with as many models as it takes."""
    if line.store == "must":
        return line.make(store=store())
    if line.models == 0:
        return line.make()
    if line.models == 1:
        return line.of(model_drafter())
    families = ("llama", "qwen2", "gpt2")[: line.models]
    return line.make(tuple((HuggingFaceModel(tiny_model(family, VOCAB)), None) for family in families))


MEMBERS: dict[str, Callable[[], Drafter]] = {
    **{line.word: partial(member, line) for line in tables.DRAFTERS},
    "lookup first, of one token": lambda: LookupFirst(model_drafter(), 1),
    "padded model": lambda: ModelDrafter(HuggingFaceModel(tiny_model("qwen2", VOCAB + 6))),
    "masks": lambda: ParallelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB + 1)), VOCAB, 8),
    "guesses": lambda: JacobiBlockDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), 6, 2),
    "masks behind a source": lambda: SpecDrafter(HuggingFaceModel(encoder_decoder("t5", vocab_size=VOCAB)), 4, 3, 8),
    **{name: partial(lambda own: every_head(VOCAB)[own], name) for name in every_head()},
    "riders": lambda: RiderDrafter(masks=(4, 4, 4)),
}


def begun(drafter: Drafter, text: Text, temperature: float, room: int) -> Any:
    """Return the state of a drafter that has read the text, with the target's hidden states if it reads any."""
    target = HuggingFaceModel(tiny_model("llama", VOCAB))
    reader = Reader.new(target, len(text.lengths), room, drafter.needs.layers) if drafter.needs.layers else None
    state = drafter.start(text, Session(SamplingParams(temperature=temperature), room, VOCAB, reader, LOOP))
    return drafter.read(state, text, None if reader is None else reader.catch_up(text)[1])


def takes(name: str, scheme: Scheme) -> bool:
    try:
        MEMBERS[name]().check(scheme)
    except UnpairedScheme:
        return False
    return True


PAIRED = [(name, scheme) for name in MEMBERS for scheme in EVERY if takes(name, scheme)]
UNPAIRED = [(name, scheme) for name in MEMBERS for scheme in EVERY if (name, scheme) not in PAIRED]
POLICIES = (Chain(3), Widths((3, 2, 1)), Fixed(EAGLE_25))


def text_of(rows: list[list[int]]) -> Text:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), 48, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, lengths)


def tree_of(draft: Draft | Pieces) -> TokenTree:
    """Return the tree of all rows."""
    return stacked_tree([(piece.rows, piece.draft.tree) for piece in in_pieces(draft)])


def check_draft(draft: Draft | Pieces, text: Text, scheme: Scheme, policy: TreePolicy) -> None:
    """Check everything that a draft promises: each row is in one piece, and every piece is a sound draft."""
    pieces = in_pieces(draft)
    assert sorted(row for piece in pieces for row in piece.rows) == [*range(len(text.lengths))]
    for piece in pieces:
        check_piece(piece.draft, text.of(piece.rows), scheme, policy)


def check_piece(draft: Draft, text: Text, scheme: Scheme, policy: TreePolicy) -> None:
    """Check the draft of some rows."""
    tree = draft.tree
    batch, nodes = tree.tokens.shape
    assert batch == len(text.lengths)
    assert nodes <= policy.shape.size
    assert torch.equal(tree.tokens[:, 0], text.last())
    assert tree.valid[:, 0].all()
    assert (tree.parents[:, 0] == -1).all()
    assert (tree.parents[:, 1:] >= 0).all()
    assert (tree.parents < torch.arange(nodes)).all()
    assert (tree.valid.gather(-1, tree.parents.clamp_min(0)) | ~tree.valid).all()
    assert ((tree.tokens >= 0) & (tree.tokens < VOCAB)).all()
    check_laws(draft, scheme)


def check_riders(draft: Draft | Pieces, most: int) -> None:
    """Check that there are no more riders than announced, and that each sees itself and no padding."""
    for riders in (piece.draft.riders for piece in in_pieces(draft)):
        if riders is None:
            continue
        count = riders.tokens.shape[1]
        assert 0 < count <= most
        assert ((riders.tokens >= 0) & (riders.tokens < VOCAB)).all()
        behind = riders.sees[..., -count:]
        assert behind.diagonal(dim1=1, dim2=2).all()
        assert not (behind & riders.valid.unsqueeze(-1) & ~riders.valid.unsqueeze(1)).any()


def check_laws(draft: Draft, scheme: Scheme) -> None:
    """Check that the children are what the shortlists and probabilities say, and could have been drawn from them."""
    tree = draft.tree
    for row, node in tree.valid.nonzero().tolist():
        listed = [token for token in draft.shortlist[row, node].tolist() if token >= 0]
        assert len(set(listed)) == len(listed)
        children = [child for child in tree.children[row, node].tolist() if child >= 0]
        atoms = draft.atoms[row, children]
        assert draft.shortlist[row, node, atoms].tolist() == tree.tokens[row, children].tolist()
        totals = draft.probs[row, node].sum(dim=-1).flatten().tolist()  # a row, or one for each of several models
        if children:
            assert totals == pytest.approx([1] * len(totals), abs=1e-6)
            assert scheme.probability(draft.probs[row, node].unsqueeze(0), atoms.unsqueeze(0)) > 0
        else:
            assert all(total == pytest.approx(round(total), abs=1e-6) and total < 1.5 for total in totals)


@pytest.mark.long(45)
@pytest.mark.parametrize("policy", POLICIES, ids=["chain", "widths", "eagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("member", "scheme"), PAIRED, ids=lambda one: getattr(one, "name", one))
def test_three_steps(member: str, scheme: Scheme, temperature: float, policy: TreePolicy) -> None:
    drafter = MEMBERS[member]()
    drafter.check(scheme)
    rows = [list(row) for row in ROWS]
    text, noise = text_of(rows), Noise.from_seed(0, len(rows))
    state = begun(drafter, text, temperature, 48 + policy.shape.size)
    for step in range(3):
        draft, state = drafter.draft(state, DraftRequest(text, scheme, policy, noise))
        check_draft(draft, text, scheme, policy)
        check_riders(draft, drafter.needs.riders)
        tree = tree_of(draft)
        path = torch.full((len(rows), policy.shape.depth), -1)
        for row in range(len(rows)):
            first = int(tree.children[row, 0, 0])
            kept = [first] if first >= 0 and tree.valid[row, first] and (row + step) % 2 else []
            path[row, : len(kept)] = torch.tensor(kept)
            rows[row] += [*tree.tokens[row, kept].tolist(), (3 * row + step) % VOCAB]
        next_token = torch.tensor([row[-1] for row in rows])
        verdict = Verdict(path, (path >= 0).sum(dim=-1), next_token)
        whole = replace(in_pieces(draft)[0].draft, tree=tree)
        hidden = {layer: WIDTH for layer in drafter.needs.layers}
        state = drafter.commit(state, step_of(text, whole, verdict, VOCAB, hidden))
        text = text_of(rows)


@pytest.mark.parametrize(("member", "scheme"), UNPAIRED, ids=lambda one: getattr(one, "name", one))
def test_a_scheme_that_it_cannot_serve_is_refused(member: str, scheme: Scheme) -> None:
    with pytest.raises(UnpairedScheme, match=f"works with drafts that are .*, not {scheme.name}"):
        MEMBERS[member]().check(scheme)


@pytest.mark.parametrize("member", MEMBERS)
def test_what_tables_and_the_engine_ask(member: str) -> None:
    drafter = MEMBERS[member]()
    assert isinstance(drafter, Drafter)
    assert drafter.name
    assert bool(drafter.needs.layers) == (member in every_head())
    assert bool(drafter.needs.riders) == (member in ("lookahead", "riders"))


@pytest.mark.long(34)
@pytest.mark.parametrize(("member", "scheme"), PAIRED, ids=lambda one: getattr(one, "name", one))
def test_the_same_noise_gives_the_same_draft(member: str, scheme: Scheme) -> None:
    drafter, text, policy = MEMBERS[member](), text_of(ROWS), Fixed(EAGLE_25)
    drafts = []
    for _ in range(2):
        state = begun(drafter, text, 1.0, 80)
        drafts.append(
            tree_of(drafter.draft(state, DraftRequest(text, scheme, policy, Noise.from_seed(4, len(ROWS))))[0])
        )
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert torch.equal(drafts[0].valid, drafts[1].valid)
