"""Lookups before another drafter: what is looked up, what the other drafter reads later, and the law of the text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles import perturbed, step_of, tiny_model
from torch import Tensor

import polydraft
from polydraft.conformance import check
from polydraft.drafters import (
    DraftRequest,
    EnsembleDrafter,
    JacobiDrafter,
    LookaheadDrafter,
    LookupFirst,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    OuroborosDrafter,
    RecyclingDrafter,
    RoutedDrafter,
    Session,
)
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID, Coupled, Product, Scheme, TopK, WithoutReplacement
from polydraft.trees import Chain, Draft, Pieces, Verdict, Widths, in_pieces, stacked_tree
from polydraft.verifiers import BlockVerification, NaiveMatch, RecursiveRejection, TopDown, TreeVerifier

VOCAB = 20
TARGET = tiny_model("llama", VOCAB)
MODEL = HuggingFaceModel(perturbed(TARGET, 0.05))
TREE = Widths((3, 2, 1, 1, 1))


def text_of(*rows: list[int]) -> Text:
    tokens = torch.zeros(len(rows), 64, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def session(vocab: int = VOCAB) -> Session:
    return Session(SamplingParams(temperature=0), 128, vocab)


def drafted(drafter: Any, text: Text, scheme: Scheme, state: Any = None) -> Draft:
    state = drafter.start(text, session()) if state is None else state
    draft, _ = drafter.draft(state, DraftRequest(text, scheme, TREE, Noise.from_seed(1, len(text.lengths))))
    assert isinstance(draft, Draft)
    return draft


def test_a_text_that_repeats_itself_is_continued_as_before() -> None:
    drafter, text = LookupFirst(ModelDrafter(MODEL)), text_of([4, 5, 6, 7, 8, 9, 4, 5, 6])
    for scheme in (TopK(), IID()):
        draft = drafted(drafter, text, scheme)
        assert draft.tree.tokens.tolist() == [[6, *2 * [7, 8, 9, 4, 5, 6]]]
        assert draft.tree.topology.width == 1 and float(draft.probs[:, :12].min()) == 1
    assert drafted(drafter, text, Product()).probs.shape == (1, 13, 1, 1)
    assert drafted(LookupFirst(ModelDrafter(MODEL), most=2), text, TopK()).tree.tokens.tolist() == [[6, 7, 8]]


def test_no_chain_is_longer_than_the_trees_of_the_policy() -> None:
    drafter, text = LookupFirst(ModelDrafter(MODEL)), text_of([4, 5, 6, 7, 8, 9, 4, 5, 6])
    draft, _ = drafter.draft(
        drafter.start(text, session()), DraftRequest(text, TopK(), Chain(3), Noise.from_seed(0, 1))
    )
    assert draft.tree.tokens.tolist() == [[6, 7, 8, 9]]


@pytest.mark.parametrize(
    "rows",
    [
        ([1, 2, 3, 4, 5],),
        ([4, 5, 6, 7, 8, 5, 6],),
        ([1, 2, 3, 4, 5], [9]),
        ([3, 4, 5, 6, 19, 18, 4, 5, 6],),
    ],
    ids=["new", "two tokens are not trusted", "several rows", "a token that the target has not"],
)
def test_elsewhere_the_other_drafter_drafts(rows: tuple[list[int], ...]) -> None:
    text, own = text_of(*rows), ModelDrafter(MODEL)
    drafter, vocab = LookupFirst(own), 19 if 19 in rows[0] else VOCAB
    states = [one.start(text, session(vocab)) for one in (drafter, own)]
    found, expected = (drafted(one, text, TopK(), state) for one, state in zip((drafter, own), states, strict=True))
    assert torch.equal(found.tree.tokens, expected.tree.tokens) and torch.equal(found.probs, expected.probs)


def test_the_other_drafter_reads_what_it_has_missed() -> None:
    """After two lookups, of which drafts are kept, it drafts what one that has read everything drafts."""
    drafter, own = LookupFirst(ModelDrafter(MODEL)), ModelDrafter(MODEL)
    row = [4, 5, 6, 7, 8, 9, 4, 5, 6]
    text = text_of(row)
    state = drafter.read(drafter.start(text, session()), text, None)
    for kept, following, later in ((2, 4, (5, 6)), (0, 11, ())):
        text = text_of(row)
        draft, state = drafter.draft(state, DraftRequest(text, TopK(), TREE, Noise.from_seed(1, 1)))
        assert draft.tree.topology.width == 1
        path = torch.tensor([[*range(1, kept + 1)] + [-1] * (6 - kept)])
        verdict = Verdict(path, torch.tensor([kept]), torch.tensor([following]))
        state = drafter.commit(state, step_of(text, draft, verdict))
        row = [*row, *draft.tree.tokens[0, 1 : kept + 1].tolist(), following]
        for token in later:  # steps in which nothing was drafted
            nothing = Verdict(path[:, :0], torch.tensor([0]), torch.tensor([token]))
            state = drafter.commit(state, step_of(text_of(row), Draft.nothing(text_of(row).last()), nothing))
            row = [*row, token]
    text = text_of(row)
    assert state.other.reader.read == (8,) and text.counts == (15,)
    found, expected = drafted(drafter, text, TopK(), state), drafted(own, text, TopK())
    assert torch.equal(found.tree.tokens, expected.tree.tokens)
    torch.testing.assert_close(found.probs, expected.probs, rtol=0, atol=1e-12)


def test_a_route_books_no_lookup_as_a_draft_of_its_other_drafter() -> None:
    """The route is asked for all rows, and its drafts for the first are nobody's: it is looked up."""
    route = RoutedDrafter((NgramDrafter(9, 9),), ModelDrafter(MODEL))
    drafter, text = LookupFirst(route), text_of([4, 5, 6, 7, 8, 9, 4, 5, 6], [1, 2, 3], [3, 2, 1])
    state, booked = drafter.read(drafter.start(text, session()), text, None), [0, 0, 0]
    for seed in range(9):
        draft, after = drafter.draft(state, DraftRequest(text, TopK(), TREE, Noise.from_seed(seed, 3)))
        assert after.asked == (1, 2)
        tree = stacked_tree([(piece.rows, piece.draft.tree) for piece in in_pieces(draft)])
        verdict = Verdict(torch.tensor([[1, 2], [-1, -1], [1, -1]]), torch.tensor([2, 0, 1]), torch.tensor([8, 1, 1]))
        step = replace(step_of(text, in_pieces(draft)[0].draft, verdict), tree=tree)
        standings = drafter.commit(after, step).other.standings
        assert [one.asked for one in standings] == [row in {*after.other.asked} - {0} for row in range(3)]
        booked = [count + (row in after.other.asked) for row, count in enumerate(booked)]
    assert min(booked) > 0  # the case is met


def test_greedy_text_is_that_of_plain_decoding_with_and_without_lookups() -> None:
    for prompt in ([1, 2, 3, 1, 2, 3, 1, 2], [5, 9, 2]):
        ids, options = torch.tensor([prompt]), {"temperature": 0, "max_new_tokens": 60}
        plain = polydraft.generate(TARGET, ids, drafter=polydraft.NoDraft(), **options)
        found = polydraft.generate(TARGET, ids, drafter=LookupFirst(ModelDrafter(MODEL)), **options)
        assert torch.equal(found.sequences, plain.sequences)
        assert found.statistics.block_efficiency > 1


def test_each_row_of_a_batch_is_looked_up_or_not_by_itself() -> None:
    """Looked-up rows get what they get alone; the others what the other drafter gives them, with their own streams."""
    rows = ([4, 5, 6, 7, 4, 5, 6], [1, 2, 3, 4, 5], [9], [8, 2, 1, 3, 2, 1, 8, 2, 1])
    drafter, own, text = LookupFirst(ModelDrafter(MODEL)), ModelDrafter(MODEL), text_of(*rows)
    state = drafter.start(text, session())
    for scheme in (IID(), TopK()):
        draft, after = drafter.draft(state, DraftRequest(text, scheme, TREE, Noise.from_seed(7, len(rows))))
        assert isinstance(draft, Pieces) and after.asked == (1, 2)
        assert [piece.rows for piece in draft.pieces] == [(0, 3), (1, 2)]
        looked, others = (piece.draft for piece in draft.pieces)
        assert looked.tree.tokens[looked.tree.valid].tolist() == [6, *3 * [7, 4, 5, 6], 1, *2 * [3, 2, 1, 8, 2, 1]]
        alone = text_of(*rows[1:3])
        expected, _ = own.draft(
            own.start(alone, session()), DraftRequest(alone, scheme, TREE, Noise.from_seed(7, len(rows)).of([1, 2]))
        )
        assert torch.equal(others.tree.tokens, expected.tree.tokens) and torch.equal(others.atoms, expected.atoms)
        torch.testing.assert_close(others.probs, expected.probs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", [IID(), TopK(), WithoutReplacement()], ids=lambda scheme: scheme.name)
def test_the_other_drafter_reads_what_it_has_missed_in_every_row(scheme: Scheme) -> None:
    """Rows are looked up in different steps; whenever the other drafter drafts, it drafts what a fresh one does."""
    drafter, own = LookupFirst(ModelDrafter(MODEL), trusted=2), ModelDrafter(MODEL)
    rows = [[4, 5, 6, 7, 4, 5], [1, 2, 3, 4, 5], [9], [1, 9, 5, 9, 9, 1, 9]]
    state, kinds = drafter.read(drafter.start(text_of(*rows), session()), text_of(*rows), None), set[str]()
    # what is appended after each step; it repeats what came before in some rows, and not in others
    fresh = ((6, 0, 2, 5), (8, 1, 9, 0), (7, 11, 2, 3), (0, 2, 9, 0), (10, 3, 7, 14), (3, 2, 8, 1))
    for step, following in enumerate(fresh):
        text, noise = text_of(*rows), Noise.from_seed(step, len(rows))
        draft, state = drafter.draft(state, DraftRequest(text, scheme, TREE, noise))
        kinds |= {"some" if isinstance(draft, Pieces) else "none" if state.asked else "all"}
        tree = stacked_tree([(piece.rows, piece.draft.tree) for piece in in_pieces(draft)])
        expected, _ = own.draft(
            own.start(text, session()), DraftRequest(text, scheme, TREE, Noise.from_seed(step, len(rows)))
        )
        for piece in in_pieces(draft):
            for place, row in enumerate(piece.rows):
                if row in state.asked:
                    assert torch.equal(piece.draft.tree.tokens[place], expected.tree.tokens[row])
                    torch.testing.assert_close(piece.draft.probs[place], expected.probs[row], rtol=0, atol=1e-10)
        path = torch.full((len(rows), 2), -1)
        for row, token in enumerate(following):
            kept = [int(tree.children[row, 0, 0])] if (row + step) % 2 else []
            kept = [node for node in kept if node > 0 and bool(tree.valid[row, node])]
            path[row, : len(kept)] = torch.tensor(kept)
            rows[row] = [*rows[row], *tree.tokens[row, kept].tolist(), token]
        verdict = Verdict(path, (path >= 0).sum(dim=-1), torch.tensor(following))
        state = drafter.commit(state, step_of(text, replace(in_pieces(draft)[0].draft, tree=tree), verdict))
    assert "some" in kinds and "none" in kinds


def mixed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for every draft whether some rows were looked up and others not."""
    seen, draft = list[bool](), LookupFirst.draft

    def noted(self: LookupFirst, *arguments: Any) -> Any:
        found = draft(self, *arguments)
        seen.append(isinstance(found[0], Pieces))
        return found

    monkeypatch.setattr(LookupFirst, "draft", noted)
    return seen


REPEATING = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 9, 2, 7, 0, 3, 11, 4], [6, 6, 6, 6, 6, 6, 6, 6], [8, 1, 8, 13, 1, 8, 2, 5]]
INNER = {
    "model": lambda: ModelDrafter(MODEL),
    "ensemble": lambda: EnsembleDrafter(((MODEL, None), (MODEL, SamplingParams(temperature=1.5)))),
    "none": NoDraft,
    "lookahead": lambda: LookaheadDrafter(3, 3, 2),
    "lookahead of the text": lambda: LookaheadDrafter(3, 3, 2, pool_from_prompt=True),
    "ouroboros": lambda: OuroborosDrafter(MODEL, 3, level=3, window=3, guesses=2),
    "jacobi": JacobiDrafter,
    "recycling": RecyclingDrafter,
    "route": lambda: RoutedDrafter((RecyclingDrafter(), JacobiDrafter())),
}


TEXTUAL = [*INNER][3:]


@pytest.mark.long(4)
@pytest.mark.parametrize("inner", INNER)
def test_greedy_texts_of_a_batch_are_those_of_plain_decoding(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, options = mixed(monkeypatch), {"temperature": 0, "max_new_tokens": 30}
    ids = torch.tensor(REPEATING)
    plain = polydraft.generate(TARGET, ids, drafter=NoDraft(), **options)
    found = polydraft.generate(TARGET, ids, drafter=LookupFirst(INNER[inner](), trusted=2), **options)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.fallback == ""
    assert any(seen) and found.statistics.block_efficiency > 1


@pytest.mark.long(2)
@pytest.mark.parametrize(
    ("inner", "verifier", "policy"),
    [
        ("model", None, None),
        ("model", BlockVerification(), Chain(3)),
        ("model", TopDown(RecursiveRejection()), Widths((2, 1, 1))),
        ("model", TopDown(NaiveMatch(TopK())), Widths((3, 2))),
        ("model", TopDown(NaiveMatch(Coupled())), Widths((2, 2))),
        ("ensemble", None, None),
        ("none", None, None),
        *((inner, None, None) for inner in TEXTUAL),
    ],
    ids=["default", "block", "recursive rejection", "naive match", "coupled", "ensemble", "none", *TEXTUAL],
)
def test_a_seed_gives_a_row_of_a_batch_the_text_that_it_gives_it_alone(
    inner: str, verifier: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, drafter = mixed(monkeypatch), LookupFirst(INNER[inner](), trusted=1)
    options = {"temperature": 1.0, "top_k": 0, "max_new_tokens": 16, "verifier": verifier, "policy": policy}
    done = [*polydraft.generate_many(TARGET, REPEATING, batch_size=4, drafter=drafter, seed=3, **options)]
    assert any(seen) and len(done) == len(REPEATING)
    for one in done:
        ids = torch.tensor([REPEATING[one.name]])
        alone = polydraft.generate(
            TARGET, ids, attention_mask=torch.ones_like(ids), drafter=drafter, seed=one.seed, **options
        )
        assert one.tokens == alone.sequences[0, ids.shape[1] :].tolist()


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("verifier", "policy"),
    [
        (BlockVerification(), Chain(3)),
        (TopDown(RecursiveRejection()), Widths((2, 1))),
        (TopDown(NaiveMatch(TopK())), Widths((2, 1))),
    ],
    ids=["block", "recursive rejection", "naive match"],
)
def test_sampled_text_has_the_targets_law(verifier: TreeVerifier, policy: Any) -> None:
    """By a sequential test with false-alarm rate 1e-3; prompts are looked up in the first step."""
    options = {"temperature": 1.0, "top_k": 0, "max_new_tokens": 3, "verifier": verifier, "policy": policy}

    def sampled(prompts: list[list[int]], seeds: list[int]) -> Tensor:
        ids = torch.tensor(prompts)
        drafter = LookupFirst(ModelDrafter(MODEL), trusted=2)
        found = polydraft.generate(
            TARGET, ids, attention_mask=torch.ones_like(ids), drafter=drafter, seed=seeds[0], **options
        )
        return found.sequences[:, ids.shape[1] :]

    report = check(sampled, TARGET, [[1, 2, 3, 4, 1, 2]], batch_size=500, most_samples=2000)
    assert report.passed and report.samples == 2000


@pytest.mark.wrong_types
@pytest.mark.parametrize("wrong", [{"trusted": 0}, {"most": 0}, {"trusted": "3"}, {"trusted": 2.5}, {"most": None}])
def test_numbers_below_one_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="must be whole numbers of at least 1"):
        LookupFirst(ModelDrafter(MODEL), **wrong)


@pytest.mark.wrong_types
def test_lookups_go_before_a_drafter_alone() -> None:
    with pytest.raises(InvalidParameter, match="not before 'model'"):
        LookupFirst("model")  # type: ignore[arg-type]
