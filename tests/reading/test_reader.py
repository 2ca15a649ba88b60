"""A reader scores what the plain model scores, however it came to have read what it has read."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from doubles import TREE_KINDS, plain_logits, tiny_model
from torch import Tensor

from polydraft.errors import UnsupportedModel
from polydraft.models import HuggingFaceModel, Layer, LayerSet, TreeCache
from polydraft.reading import Features, Reader, Step, Text
from polydraft.trees import Draft, Resume, Riders, TokenTree, Topology, TreeShape, Verdict, stacked_tree, topology

VOCAB, CAPACITY = 24, 48
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8, 2, 8]]
EVEN = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1], [9, 9, 8, 7, 9, 8, 9]]
SHAPE = TreeShape(((3,), (2, 0, 1), (1, 2)))
LAYERS: tuple[Layer, ...] = (0, 1, "final")


@cache
def model(kind: str = "llama") -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model(kind, VOCAB))


def text_of(rows: Sequence[Sequence[int]]) -> Text:
    """Return rows as a text, with anything behind each."""
    tokens = torch.full((len(rows), 32), 23)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def tree_below(text: Text, seed: int = 0, shape: TreeShape = SHAPE) -> TokenTree:
    """Return a tree of any tokens below every row."""
    batch = len(text.lengths)
    tokens = torch.randint(VOCAB, (batch, shape.size), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = text.last()
    return TokenTree(tokens, topology(shape, batch, torch.device("cpu")), torch.ones_like(tokens, dtype=torch.bool))


def of(tree: TokenTree, rows: list[int]) -> TokenTree:
    """Return the trees of some rows."""
    return TokenTree(tree.tokens[rows], Topology(tree.parents[rows]), tree.valid[rows])


def new(rows: int = len(ROWS), kind: str = "llama", layers: tuple[Layer, ...] = ()) -> Reader:
    return Reader.new(model(kind), rows, CAPACITY, layers)


def path(tree: TokenTree, row: int, node: int) -> list[int]:
    """Return the nodes from below the root to a node."""
    return (tree.ancestors[row, node, 1:].nonzero().squeeze(-1) + 1).tolist()


def plain(tree: TokenTree, rows: Sequence[Sequence[int]], kind: str = "llama") -> Tensor:
    """Score the tree path by path, by plain passes."""
    nodes = range(tree.tokens.shape[1])
    return torch.stack(
        [
            torch.stack(
                [plain_logits(model(kind).model, [*text, *tree.tokens[row, path(tree, row, node)]]) for node in nodes]
            )
            for row, text in enumerate(rows)
        ]
    )


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def check_scores(reader: Reader, rows: Sequence[Sequence[int]], seed: int = 0, kind: str = "llama") -> Reader:
    """Compare the scores of a tree to plain passes, and return the reader that has scored it."""
    text = text_of(rows)
    tree = tree_below(text, seed)
    scored, after = reader.score(text, tree)
    close(scored.logits, plain(tree, rows, kind))
    assert after.read == text.counts and scored.riders is None
    return after


def verdict_at(tree: TokenTree, nodes: Sequence[int], following: int = 11) -> Verdict:
    """Accept the paths that end at these nodes."""
    paths = torch.full((len(nodes), tree.topology.height), -1)
    for row, node in enumerate(nodes):
        kept = path(tree, row, node)
        paths[row, : len(kept)] = torch.tensor(kept, dtype=torch.int64)
    return Verdict(paths, (paths >= 0).sum(dim=-1), torch.full((len(nodes),), following))


def extended(rows: Sequence[Sequence[int]], tree: TokenTree, nodes: Sequence[int]) -> list[list[int]]:
    """Append the tokens of the accepted paths, and what follows them."""
    pairs = enumerate(zip(rows, nodes, strict=True))
    return [[*text, *tree.tokens[row, path(tree, row, node)].tolist(), 11] for row, (text, node) in pairs]


def compact(reader: Reader, slots: Tensor, room: int) -> Reader:
    """Return a reader over copies of the same slots of all layers and heads, with room behind them."""
    cache = reader.model.new_cache(len(slots), slots.shape[1] + room)
    for row, own in enumerate(slots):
        cache.take(row, reader.cache.select([row]), [own.unsqueeze(0)], own, 0)
    return reader.over(cache, [slots.shape[1]] * len(slots))


# What was read, and how.


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [[7]], [[7], [9]]], ids=["batch", "one", "a token", "tokens"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_chunks_read_what_is_read_at_once(chunk: int, rows: list[list[int]]) -> None:
    text = text_of(rows)
    whole, chunks, count = new(len(rows)).catch_up(text)[0], new(len(rows)), 0
    while any(read < length - 1 for read, length in zip(chunks.read, text.counts, strict=True)):
        before, (chunks, features) = chunks.read, chunks.catch_up(text, chunk)
        assert features is None
        assert chunks.read == tuple(
            min(one + chunk, length - 1) for one, length in zip(before, text.counts, strict=True)
        )
        count += 1
    assert whole.read == chunks.read == tuple(length - 1 for length in text.counts)
    assert count == -(-max(whole.read) // chunk)
    for row, read in enumerate(whole.read):
        if read:
            close(chunks.cache.store[:, row, :, :read], whole.cache.store[:, row, :, :read])
    assert chunks.catch_up(text) == (chunks, None), "nothing is unread but the last tokens"
    check_scores(chunks, rows)


def test_nothing_is_run_where_nothing_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, text = new().catch_up(text_of(ROWS))[0], text_of(ROWS)
    monkeypatch.setattr(HuggingFaceModel, "forward", lambda *_, **__: 1 / 0)
    assert reader.catch_up(text)[0] is reader
    with pytest.raises(ZeroDivisionError):
        reader.catch_up(text_of([[*row, 5, 6] for row in ROWS]))


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("known", [None, 0, 1, 3], ids=["all", "nothing", "one each", "three each"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [[7]]], ids=["batch", "one", "a token"])
def test_scores_of_a_tree_are_those_of_its_paths(kind: str, known: int | None, rows: list[list[int]]) -> None:
    """Whatever of the text is unread is read in the tree's pass."""
    reader = new(len(rows), kind)
    check_scores(reader if known == 0 else reader.catch_up(text_of(rows), known)[0], rows, kind=kind)


def test_what_is_scored_beside_a_wrong_text_differs() -> None:
    """What the other tests rest on: keys of other tokens give other scores."""
    reader = new(len(EVEN)).catch_up(text_of([[0] * len(row) for row in EVEN]))[0]
    with pytest.raises(AssertionError, match="not close"):
        check_scores(reader, EVEN)


def test_trees_of_different_shapes_in_one_pass() -> None:
    text = text_of(ROWS)
    wide, chain = tree_below(text, 1), tree_below(text, 2, TreeShape(((1,),) * 4))
    small = TokenTree.root_only(text.last())
    pieces = [((0, 2), of(wide, [0, 2])), ((3,), of(chain, [3])), ((1,), of(small, [1]))]
    tree = stacked_tree(pieces)
    scored, _ = new().catch_up(text, 2)[0].score(text, tree)
    for rows, own in pieces:
        close(scored.logits[list(rows), : own.tokens.shape[1]], plain(own, [ROWS[row] for row in rows]))


@pytest.mark.parametrize("catches_up", [True, False])
def test_steps_of_different_lengths(catches_up: bool) -> None:
    """Accepted paths are read text, whether or not rows had the same to read."""
    reader, rows = new(), [list(row) for row in ROWS]
    for step, nodes in enumerate([(0, 7, 4, 1), (6, 0, 2, 8), (3, 5, 0, 0)]):
        text = text_of(rows)
        reader = reader.catch_up(text)[0] if catches_up else reader
        reader, tree = check_scores(reader, rows, seed=step), tree_below(text, step)
        kept = verdict_at(tree, nodes)
        reader = reader.keep(text, kept)
        rows = extended(rows, tree, nodes)
        assert reader.read == tuple(count + more for count, more in zip(text.counts, kept.kept, strict=True))
        assert reader.read == tuple(len(row) - 1 for row in rows)
    check_scores(reader, rows, seed=9)


def test_a_step_that_was_not_scored_leaves_its_tokens_unread() -> None:
    reader, text = new().catch_up(text_of(ROWS))[0], text_of(ROWS)
    tree = tree_below(text)
    after = reader.keep(text, verdict_at(tree, (4, 7, 0, 1)))
    assert after.read == reader.read
    check_scores(after, extended(ROWS, tree, (4, 7, 0, 1)))


def test_a_step_may_be_taken_again_with_the_reader_of_before() -> None:
    reader, text = new().catch_up(text_of(ROWS))[0], text_of(ROWS)
    tree = tree_below(text)
    first, after = reader.score(text, tree)
    again, _ = reader.score(text, tree)
    close(first.logits, again.logits)
    after.keep(text, verdict_at(tree, (6, 7, 4, 1)))
    check_scores(reader, ROWS, seed=5)


# Rows that come and go.

NEWCOMERS = {"longer": [2, 7, 1, 2, 8, 1, 8, 2, 8, 4, 2, 7], "two tokens": [9, 9], "one token": [6]}


@pytest.mark.parametrize("newcomer", NEWCOMERS.values(), ids=[*NEWCOMERS])
@pytest.mark.parametrize("place", [1, 3, len(ROWS)], ids=["in place of a short row", "of the last", "behind the last"])
@pytest.mark.parametrize("batch", ["read", "unread"])
@pytest.mark.parametrize("known", [None, 1], ids=["all", "one token"])
def test_a_joined_row_scores_what_it_scores_alone(
    newcomer: list[int], place: int, batch: str, known: int | None
) -> None:
    """The other rows score what they did, and the reader that joined stays as it is."""
    reader = new().catch_up(text_of(ROWS))[0] if batch == "read" else new()
    alone = Reader.new(model(), 1, len(newcomer) + SHAPE.size).catch_up(text_of([newcomer]), known)[0]
    kept = None if alone.cache.store is None else alone.cache.store.clone()
    joined, read = reader.put(place, alone), alone.read
    rows = [*ROWS[:place], newcomer, *ROWS[place + 1 :]]
    assert joined.read == (*reader.read[:place], *read, *reader.read[place + 1 :])
    after = joined.keep(text_of(rows), verdict_at(tree_below(text_of(rows)), [0] * len(rows)))
    assert after.read == joined.read
    check_scores(joined, rows)
    assert alone.read == read and (kept is None or torch.equal(alone.cache.store, kept))
    check_scores(alone, [newcomer])


def test_rows_may_come_one_by_one_behind_none() -> None:
    reader = new(1).catch_up(text_of(ROWS[:1]))[0]
    for row in range(1, len(ROWS)):
        reader = reader.put(row, new(1).catch_up(text_of([ROWS[row]]))[0])
    assert reader.read == tuple(len(row) - 1 for row in ROWS)
    check_scores(reader, ROWS)


def sourced(rows: Sequence[Sequence[int]], sources: list[str]) -> Reader:
    """Return a reader of texts and sources that has read the texts."""
    held = model().new_cache(len(rows), CAPACITY)
    held.sources = [*sources]
    return replace(new(len(rows)), cache=held).catch_up(text_of(rows))[0]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("newcomer", [[6], [6, 4]], ids=["one token", "two tokens"])
def test_a_source_comes_with_its_row(place: int, newcomer: list[int]) -> None:
    """Also if the newcomer's only token is its root, of which nothing was read yet."""
    joined = sourced([[1, 2], [3]], ["a", "b"]).put(place, sourced([newcomer], ["new"]))
    assert isinstance(joined.cache, TreeCache)
    assert joined.cache.sources == (["new", "b"], ["a", "new"], ["a", "b", "new"])[place]
    check_scores(joined, ([newcomer, [3]], [[1, 2], newcomer], [[1, 2], [3], newcomer])[place])


@pytest.mark.parametrize("length", [0, 1, 3, 50])
def test_a_join_may_take_only_the_beginning(length: int) -> None:
    """A text that begins like another takes so many of its keys."""
    other = new(1).catch_up(text_of([[*ROWS[0][:3], 0, 0, 0, 0]]))[0]
    joined = new(2).put(1, other.cut(0, length))
    assert joined.read == (0, min(length, 6))
    check_scores(joined.cut(1, 3), [ROWS[2], ROWS[0]])


@pytest.mark.parametrize("length", [0, 1, 2, 6])
def test_what_is_forgotten_may_be_read_as_another_text(length: int) -> None:
    reader = new().catch_up(text_of(ROWS))[0].cut(0, length)
    assert reader.read == (length, 0, 1, 5)
    assert reader.cut(2, 20).read == reader.read, "nothing is forgotten of what was not read"
    rows = [[*ROWS[0][:length], *[0] * (7 - length), 4], *ROWS[1:]]
    check_scores(reader, rows)
    after = check_scores(reader, rows).cut(3, 2)
    assert after.read == (8, 1, 2, 2)
    check_scores(after.cut(0, min(length, 1)).cut(1, 0).cut(2, 0), [ROWS[0], [9, 9, 9], [1, 2], [2, 7, 3]])


# Views.


def test_a_compact_view_of_all_slots_is_the_whole() -> None:
    text = text_of(EVEN)
    reader = new(len(EVEN)).catch_up(text)[0]
    every = torch.arange(6).expand(len(EVEN), 6)
    view, rows = compact(reader, every, 3 * SHAPE.size), EVEN
    for step, nodes in enumerate([(4, 0, 7), (1, 8, 0), (0, 0, 0)]):
        text = text_of(rows)
        view, tree = check_scores(view, rows, seed=step), tree_below(text, step)
        view, rows = view.keep(text, verdict_at(tree, nodes)), extended(rows, tree, nodes)
    check_scores(reader, EVEN, seed=4)


def test_views_that_scored_nothing_yet_are_copied_and_joined_with_their_keys() -> None:
    """A view finds the memory of its cache when it is used, whatever is done with it first."""
    whole = new(len(EVEN)).catch_up(text_of(EVEN))[0]
    length, store = len(EVEN[0]) - 1, whole.cache.store
    for view, known in (
        (whole.select([1]), store[:, 1:2]),
        (replace(whole, cache=whole.cache.of_layers(0, 1)), store[:2]),
        (replace(whole, cache=whole.select([2]).cache.of_layers(0, 1), read=(length,)), store[:2, 2:3]),
    ):
        rows = known.shape[1]
        alone = view.cache.select([rows - 1])
        close(alone.keys_of(0, length), known[0, rows - 1, :, :length])
        if rows == 1:
            close(replace(view).cache.put(1, view.cache, length).store[:, :1], known)
    fresh = new(1).put(0, whole.select([1]))
    close(fresh.cache.store[..., :length, :], store[:, 1:2, :, :length])
    check_scores(fresh, EVEN[1:2])
    other = new(1).catch_up(text_of([EVEN[0][::-1]]))[0]
    check_scores(whole.select([1]).put(0, other), [EVEN[0][::-1]])
    assert torch.equal(whole.cache.store[:, 1, :, :length], other.cache.store[:, 0, :, :length]), (
        "the view's keys are the whole's"
    )


def test_a_compact_view_sees_its_slots_alone() -> None:
    """Its scores are those of a pass whose mask hides the slots that were left out; places stay those of the text."""
    rows = [ROWS[0], ROWS[3], [9, 9, 8, 7, 9, 8, 9]]
    text = text_of(rows)
    reader, tree = new(3).catch_up(text)[0], tree_below(text_of(rows))
    slots = torch.tensor([[0, 3, 6], [0, 1, 4], [2, 3, 5]])
    scored, after = compact(reader, slots, 2 * SHAPE.size).score(text, tree)
    found = scored.logits
    size, base = SHAPE.size, text.lengths - 1
    mask = torch.zeros(3, size, int(base.max()) + size, dtype=torch.bool)
    for row in range(3):
        mask[row, :, slots[row]] = True
        mask[row, :, int(base[row]) : int(base[row]) + size] = tree.ancestors[row]
    hidden = model().forward(tree.tokens, base.unsqueeze(-1) + tree.depth, mask, reader.cache, base).logits
    close(found, hidden)
    assert float((found - plain(tree, rows)).abs().max()) > 0.1, "what is left out matters"
    after = after.keep(text, verdict_at(tree, (4, 0, 7)))
    longer = extended(rows, tree, (4, 0, 7))
    assert after.read == tuple(len(row) - 1 for row in longer)
    deeper = tree_below(text_of(longer), 3)
    alone = [
        compact(Reader.new(model(), 1, CAPACITY).catch_up(text_of([row]))[0], slots[at : at + 1], 2 * size)
        for at, row in enumerate(rows)
    ]
    batch = after.score(text_of(longer), deeper)[0].logits
    for row, one in enumerate(alone):
        own, single = text_of([rows[row]]), of(tree, [row])
        one = one.score(own, single)[1].keep(own, verdict_at(single, (4, 0, 7)[row : row + 1]))
        close(one.score(text_of([longer[row]]), of(deeper, [row]))[0].logits[0], batch[row])


@pytest.mark.long(7)
@pytest.mark.parametrize("kind", [kind for kind in TREE_KINDS if kind != "gpt2"])
@pytest.mark.parametrize(
    "rows", [EVEN, ROWS, ROWS[:1], [[7]], [[7], [9]]], ids=["even", "batch", "one", "a token", "tokens"]
)
def test_the_first_layers_and_the_last_are_the_model(kind: str, rows: list[list[int]]) -> None:
    """The first layers draft over the target's own keys, and the others go on from their states."""
    reader, text = new(len(rows), kind).catch_up(text_of(rows))[0], text_of(rows)
    for step, node in enumerate((4, 0)):
        tree, text = tree_below(text, step), text_of(rows)
        first = replace(reader.viewed(reader.model.variant(layers=LayerSet(exit=1))), layers=(1,))
        early, _ = first.score(text, tree)
        assert float((early.logits - plain(tree, rows, kind)).abs().max()) > 0.1, "it is another model"
        draft = replace(Draft.nothing(text.last()), tree=tree, resume=Resume(1, early.nodes[1]))
        scored, reader = reader.score(text, tree, draft)
        close(scored.logits, plain(tree, rows, kind))
        nodes = [node] * len(rows)
        reader, rows = reader.keep(text, verdict_at(tree, nodes)), extended(rows, tree, nodes)
        text = text_of(rows)
    check_scores(reader, rows, kind=kind)


@pytest.mark.parametrize("reason", ["unread tokens", "riders", "hidden states"])
def test_what_the_first_layers_have_not_seen_is_run_through_all(reason: str) -> None:
    """Their work is only of use for root and nodes whose hidden states nobody reads."""
    text, tree = text_of(ROWS), tree_below(text_of(ROWS))
    reader = new(layers=("final",) if reason == "hidden states" else ())
    reader = reader.catch_up(text, 3 if reason == "unread tokens" else None)[0]
    early, _ = replace(reader.viewed(reader.model.variant(layers=LayerSet(exit=1))), layers=(1,)).score(text, tree)
    draft = replace(Draft.nothing(text.last()), tree=tree, resume=Resume(1, early.nodes[1]))
    if reason == "riders":
        sees = torch.zeros(len(ROWS), 1, SHAPE.size + 1, dtype=torch.bool)
        sees[..., 0] = sees[..., -1] = True
        ones = torch.ones(len(ROWS), 1, dtype=torch.int64)
        draft = replace(draft, riders=Riders(13 * ones, ones, sees, ones == 1))
    scored, after = reader.score(text, tree, draft)
    close(scored.logits, plain(tree, ROWS))
    if reason == "riders":
        assert scored.riders is not None
        close(scored.riders[:, 0], torch.stack([plain_logits(model().model, [*row, 13]) for row in ROWS]))
    elif reason == "hidden states":
        close(model().unembedded(scored.nodes["final"]), scored.logits)
    nodes = (4, 0, 7, 2)
    check_scores(after.keep(text, verdict_at(tree, nodes)), extended(ROWS, tree, nodes), seed=1)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("views", ["both", "the batch", "the newcomer"])
def test_compact_views_join(place: int, views: str) -> None:
    """A row that joins brings the number of its slots; a row that is forgotten has none."""
    rows, newcomer, slots = [ROWS[0], ROWS[3]], [2, 7, 1, 2, 9], torch.tensor([[0, 2, 3], [1, 3, 4]])
    batch, alone = new(2).catch_up(text_of(rows))[0], new(1).catch_up(text_of([newcomer]))[0]
    batch = batch if views == "the newcomer" else compact(batch, slots, 2 * SHAPE.size + 8)
    alone = alone if views == "the batch" else compact(alone, slots[:1, :2], 2 * SHAPE.size)
    joined, after = batch.put(place, alone), [*rows[:place], newcomer, *rows[place + 1 :]]
    tree = tree_below(text_of(after))
    found = joined.score(text_of(after), tree)[0].logits
    close(found[place], alone.score(text_of([newcomer]), of(tree, [place]))[0].logits[0])
    forgotten = joined.cut(place, 0)
    assert forgotten.read[place] == 0
    close(
        forgotten.score(text_of([*after[:place], [7], *after[place + 1 :]]), tree)[0].logits[place, 0],
        plain_logits(model().model, [int(tree.tokens[place, 0])]),
    )


def test_a_model_that_adds_positions_to_embeddings_is_not_resumed() -> None:
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel cannot go on from the states of its first layers"):
        model("gpt2").last_layers(1)


# Hidden states.


def states_of(text: Sequence[int], kind: str) -> tuple[Tensor, ...]:
    """Return the hidden states that the model itself reports: the embedding first, behind the last norm last."""
    with torch.no_grad():
        outputs = model(kind).model(input_ids=torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
    return outputs.hidden_states


def check_features(features: Features, rows: Sequence[Sequence[int]], firsts: Sequence[int], kind: str) -> None:
    """Check that each token from a row's first unread one is there once, with its own states.

    Args:
        features: the features.
        rows: the texts up to the last token that is there.
        firsts: per row, the first place that must be there.
        kind: the model's family.
    """
    for row, (text, first) in enumerate(zip(rows, firsts, strict=True)):
        there = (features.places[row] >= 0).nonzero().squeeze(-1)
        places = features.places[row, there]
        assert places.tolist() == [*range(first, len(text))]
        if len(text):
            expected = states_of(text, kind)
            for layer, states in features.states.items():
                own = expected[-1] if layer == "final" else expected[layer]
                close(states[row, there], own[0, places])


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_hidden_states_of_prompts(kind: str, chunk: int | None) -> None:
    """Every token but the last comes once, however many passes read the prompts; single tokens are not read."""
    reader, text, most = new(kind=kind, layers=LAYERS), text_of(ROWS), chunk or 50
    passes = 0
    while True:
        firsts = reader.read
        reader, features = reader.catch_up(text, chunk)
        if features is None:
            break
        assert {*features.states} == {*LAYERS}
        read = [row[: min(len(row) - 1, first + most)] for row, first in zip(ROWS, firsts, strict=True)]
        check_features(features, read, firsts, kind)
        passes += 1
    assert passes == {None: 1, 1: 7, 3: 3}[chunk]


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("known", [None, 0, 2], ids=["all", "nothing", "two each"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [[7]], [[7], [9]]], ids=["batch", "one", "a token", "tokens"])
def test_hidden_states_of_a_step(kind: str, known: int | None, rows: list[list[int]]) -> None:
    """They are those of what was unread, of the root, and of the accepted nodes."""
    reader, text = new(len(rows), kind, LAYERS), text_of(rows)
    reader = reader if known == 0 else reader.catch_up(text, known)[0]
    for step, nodes in enumerate([(6, 0, 4, 1), (0, 7, 8, 0)]):
        text, firsts, nodes = text_of(rows), reader.read, nodes[: len(rows)]
        tree = tree_below(text, step)
        scored, after = reader.score(text, tree)
        close(model(kind).unembedded(scored.nodes["final"]), scored.logits)
        kept = verdict_at(tree, nodes)
        taken = Step(text, tree, scored, scored.logits.softmax(dim=-1), kept)
        reader, rows = after.keep(text, kept), extended(rows, tree, nodes)
        check_features(taken.features, [row[:-1] for row in rows], firsts, kind)
        assert reader.read == tuple(len(row) - 1 for row in rows)


def test_the_last_layers_states_become_final_ones_by_the_norm() -> None:
    reader, text = new(layers=(2, "final")), text_of(ROWS)
    scored, _ = reader.score(text, tree_below(text))
    with torch.no_grad():
        close(model().model.model.norm(scored.nodes[2]), scored.nodes["final"])


# Riders.


@pytest.mark.parametrize("known", [None, 0], ids=["all", "nothing"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["batch", "one"])
def test_riders_are_scored_behind_what_they_see(known: int | None, rows: list[list[int]]) -> None:
    """Riders see the text and what they name; no node sees them; learnt embeddings enter in place of a token's own."""
    reader, text = new(len(rows), layers=("final",)), text_of(rows)
    reader, tree = (reader if known == 0 else reader.catch_up(text)[0]), tree_below(text_of(rows))
    size, batch = tree.tokens.shape[1], len(rows)
    sees = torch.zeros(batch, 3, size + 3, dtype=torch.bool)
    # the first sees the path to node 4; the second the first too; the third the root alone
    sees[:, :2, [0, *path(tree, 0, 4)]] = True
    sees[:, 0, size] = sees[:, 1, size] = sees[:, 1, size + 1] = True
    sees[:, 2, 0] = sees[:, 2, size + 2] = True
    depth = len(path(tree, 0, 4))
    tokens = torch.tensor([[13, 17, VOCAB + 1]]).expand(batch, 3)
    places = torch.tensor([[depth + 1, depth + 2, 1]]).expand(batch, 3)
    riders = Riders(tokens, places, sees, torch.ones_like(tokens, dtype=torch.bool))
    table = model().embedded(torch.tensor([[2, 19]]))[0]
    draft = replace(Draft.nothing(text.last()), tree=tree, riders=riders, embeddings=table)
    scored, after = reader.score(text, tree, draft)
    close(scored.logits, plain(tree, rows))
    assert after.read == text.counts
    for row, own in enumerate(rows):
        seen = [*own, *tree.tokens[row, path(tree, row, 4)].tolist()]
        for rider, tail in enumerate(([*seen, 13], [*seen, 13, 17], [*own, 19])):
            close(scored.riders[row, rider], plain_logits(model().model, tail))
    close(model().unembedded(scored.riding["final"]), scored.riders)
    nodes = [6] * batch
    check_scores(after.keep(text, verdict_at(tree, nodes)), extended(rows, tree, nodes), seed=1)
