"""Suffix decoding and retrieval: what they draft, what they add to a store, and that the text stays the target's."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choices import Toy, distance, law_of
from doubles import tiny_model
from hypothesis import given
from hypothesis import strategies as st

import polydraft
from polydraft import Chain, Fixed, NaiveMatch, RetrievalDrafter, SuffixDrafter, SuffixStore, TextStore, TopDown
from polydraft.conformance import check
from polydraft.drafters import (
    Drafter,
    DraftRequest,
    LookupFirst,
    MergedDrafter,
    ModelDrafter,
    RoutedDrafter,
    Session,
    StoreVocabulary,
    StoreWriter,
    flush_stores,
    resumed,
)
from polydraft.drafters.text.guess import Guess
from polydraft.drafters.text.index import IndexedText
from polydraft.drafters.text.suffix import TREES, room_for_paths
from polydraft.errors import InvalidParameter, StoreError, VocabularyMismatch
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.rows import put
from polydraft.schemes import Given
from polydraft.trees import TreePolicy

VOCAB = 24
WIDE = Fixed(room_for_paths(12, 6, 3))
PROMPTS = ([3, 1, 4, 3, 1, 4, 3, 1], [7], [2, 7, 1, 8, 2, 7])


def text_of(*rows: list[int]) -> Text:
    tokens = torch.zeros(len(rows), 64, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def drafted(drafter: Drafter, *rows: list[int], policy: TreePolicy = WIDE, vocab: int = VOCAB) -> list[set[tuple]]:
    """Return the drafted paths of every row."""
    text = text_of(*rows)
    state = drafter.start(text, Session(SamplingParams(), 64, vocab))
    draft: Any = drafter.draft(state, DraftRequest(text, Given(), policy, Noise.from_seed(0, len(rows))))[0]
    found = []
    for row in range(len(rows)):
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in range(1, draft.tree.tokens.shape[1]):
            if draft.tree.valid[row, node]:
                paths[node] = (*paths[int(draft.tree.parents[row, node])], int(draft.tree.tokens[row, node]))
        found.append({path for path in paths.values() if path})
    return found


def written(folder: Path, *texts: list[int], vocab: int = VOCAB) -> Path:
    with StoreWriter(folder, StoreVocabulary(vocab)) as writer:
        for text in texts:
            writer.add(text)
    return folder


def test_bounds_are_those_that_were_asked_for() -> None:
    for policy, nodes, depth, children in ((TREES, 16, 12, 4), (WIDE, 12, 6, 3)):
        shape = policy.largest
        assert (shape.size - 1, shape.depth, shape.max_children) == (nodes, depth, children)
        policy.check(Given())


def test_what_followed_the_longest_match_is_drafted_by_its_length() -> None:
    assert drafted(SuffixDrafter(), [1, 2, 3, 4, 5, 1, 2, 3]) == [{(4,), (4, 5), (4, 5, 1)}]
    assert drafted(SuffixDrafter(factor=2), [9, 3, 4, 5, 1, 3]) == [{(4,), (4, 5)}]
    assert drafted(SuffixDrafter(offset=3.0), [9, 3, 4, 5, 3]) == [{(4,), (4, 5), (4, 5, 3)}]
    assert drafted(SuffixDrafter(), [1, 2, 3], [5, 5]) == [set(), {(5,)}]
    assert drafted(SuffixDrafter(factor=0.5), [9, 3, 4, 5, 3]) == [set()]


def test_branches_are_weighed_by_how_often_they_were_taken() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2]
    assert drafted(SuffixDrafter(), text, policy=Chain(4)) == [{(8,), (8, 1), (8, 1, 2)}], "up to the end"
    tree = drafted(SuffixDrafter(longest=2), text)
    assert tree == [{(8,), (8, 1)}], "two tokens agree, so that there is room for two"
    assert {(8,), (7,)} <= drafted(SuffixDrafter(longest=2, factor=4), text)[0]
    assert drafted(SuffixDrafter(longest=2, factor=4, least=0.5), text)[0].isdisjoint({(7,)})


def test_tokens_that_the_target_does_not_have_are_not_drafted(tmp_path: Path) -> None:
    assert drafted(SuffixDrafter(), [1, 9, 1], vocab=9) == [set()]
    store = written(tmp_path / "store", [1, 2, 30, 3])
    assert drafted(RetrievalDrafter(store), [1, 2]) == [set()]


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=20), stored=st.lists(st.integers(0, 2), min_size=2))
def test_every_path_was_seen(text: list[int], stored: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    store = SuffixStore(tmp_path_factory.mktemp("store"))
    store.add(stored)
    for drafter in (SuffixDrafter(), SuffixDrafter(store=store, keeps=False)):
        for path in drafted(drafter, text)[0]:
            seen = [text] if drafter.store is None else [text, stored]
            assert any((text[-1], *path) == tuple(one[at : at + 1 + len(path)]) for one in seen for at in range(20))


def test_the_store_wins_where_it_promises_more(tmp_path: Path) -> None:
    store = SuffixStore(tmp_path)
    store.add([5, 1, 2, 3, 4, 6, 6])
    drafter = SuffixDrafter(store=store)
    assert drafted(drafter, [3, 8, 1, 2, 3]) == [{(4,), (4, 6), (4, 6, 6)}]
    assert drafted(drafter, [1, 2, 3, 9, 1, 2, 3]) == [{(9,), (9, 1), (9, 1, 2)}], "of equal ones the text's own"


def test_retrieval_takes_the_longest_end_that_occurs(tmp_path: Path) -> None:
    store = written(tmp_path / "store", [1, 2, 3, 4], [9, 2, 3, 5, 6], [8, 2, 3, 5, 7], [3, 9])
    drafter = RetrievalDrafter(store)
    assert drafted(drafter, [1, 2, 3]) == [{(4,)}]
    assert drafted(drafter, [7, 2, 3]) == [{(5,), (4,), (5, 6), (5, 7)}]
    assert drafted(drafter, [7, 7, 3]) == [set()], "one token is too short"
    assert drafted(RetrievalDrafter(store, shortest=1, following=1), [7, 7, 3]) == [{(5,), (4,), (9,)}]
    assert drafted(RetrievalDrafter(TextStore(store), longest=2), [1, 2, 3]) == [{(5,), (4,), (5, 6), (5, 7)}]
    assert drafted(drafter, [7, 2, 3], [1, 2], policy=Chain(2)) == [{(5,), (5, 7)}, {(3,), (3, 4)}]


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda _: SuffixDrafter(longest=0), "longest must be a whole number from 1 to 64, but is 0"),
    (lambda _: SuffixDrafter(longest=65), "longest must be"),
    (lambda _: SuffixDrafter(factor=-1), "factor must be a finite number >= 0, but is -1"),
    (lambda _: SuffixDrafter(factor=float("nan")), "factor must be"),
    (lambda _: SuffixDrafter(offset=float("inf")), "offset must be a finite number, but is inf"),
    (lambda _: SuffixDrafter(least=1.5), "least must be a number from 0 to 1, but is 1.5"),
    (lambda _: SuffixDrafter(occurrences=0), "occurrences must be a whole number of at least 1"),
    (lambda place: RetrievalDrafter(place, longest=2, shortest=3), "shortest must be no more than longest"),
    (lambda place: RetrievalDrafter(place, following=0), "following must be"),
    (lambda place: RetrievalDrafter(place, longest=True), "longest must be"),
]


@pytest.mark.parametrize(("make", "says"), BAD, ids=[says for _, says in BAD])
def test_wrong_values_are_refused(make: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=says):
        make(written(tmp_path / "store", [1, 2, 3]))


WRONG = """
import sys
from polydraft import RetrievalDrafter, SuffixDrafter, SuffixStore, TextStore
from polydraft.errors import InvalidParameter
place = sys.argv[1]
for call in (
    lambda: SuffixDrafter(longest=2.5),
    lambda: SuffixDrafter(factor="x"),
    lambda: SuffixDrafter(store=TextStore(place)),
    lambda: RetrievalDrafter(3),
    lambda: RetrievalDrafter(place, following=2.5),
    lambda: SuffixStore(place, most_bytes=1e9),
    lambda: SuffixStore(place, most_bytes="x"),
):
    try:
        print(call())
    except InvalidParameter as error:
        print(error)
"""


@pytest.mark.slow
def test_wrong_types_are_refused(tmp_path: Path) -> None:
    """In a process without the checker that pytest may put around the package, which would see them first."""
    place = written(tmp_path / "store", [1, 2, 3])
    done = subprocess.run([sys.executable, "-c", WRONG, str(place)], capture_output=True, text=True, check=True)
    says = done.stdout.splitlines()
    names = ["longest", "factor", "store", "store", "following", "most_bytes", "most_bytes"]
    assert len(says) == 7 and all(one.startswith(f"{name} must be") for one, name in zip(says, names, strict=True))


@cache
def target() -> Any:
    return tiny_model("llama", VOCAB)


def ids_of(rows: tuple[list[int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def generated(rows: tuple[list[int], ...] = PROMPTS, **options: Any) -> Any:
    ids, mask = ids_of(rows)
    return polydraft.generate(target(), ids, attention_mask=mask, max_new_tokens=16, **options)


def members(folder: Path) -> dict[str, Drafter]:
    plain = [row.tolist() for row in generated(drafter="none").sequences]
    store = SuffixStore(folder / "growing")
    store.add(plain[0])
    read = written(folder / "read", *(text[4:] for text in plain), [3, 1, 4, 4, 4], [2, 7, 7])
    suffix = SuffixDrafter(store=store)
    model = ModelDrafter(HuggingFaceModel(target()))
    return {
        "alone": SuffixDrafter(factor=2),
        "with a store": suffix,
        "rest": RetrievalDrafter(read, shortest=1),
        "lookup first": LookupFirst(model),
    }


@pytest.mark.long(5)
@pytest.mark.parametrize("member", ["alone", "with a store", "rest"])
@pytest.mark.parametrize("policy", [None, WIDE, Chain(4), "best-first:8"], ids=["usual", "wide", "chain", "best"])
def test_greedy_texts_are_those_of_plain_decoding(member: str, policy: Any, tmp_path: Path) -> None:
    plain = generated(drafter="none")
    drafter = members(tmp_path)[member]
    for _ in range(2):  # the second time with the first texts in the store
        found = generated(drafter=drafter, policy=policy)
        assert torch.equal(found.sequences, plain.sequences) and not found.statistics.fallback
    assert found.statistics.accepted > 0
    lone = [generated((row,), drafter=drafter, policy=policy) for row in PROMPTS]
    for own, row in zip(lone, plain.sequences, strict=True):
        assert own.sequences[0, -16:].tolist() == row[-16:].tolist()


@pytest.mark.long(1)
@pytest.mark.parametrize("member", ["alone", "with a store", "rest"])
def test_texts_that_join_a_running_batch_are_what_they_are_alone(member: str, tmp_path: Path) -> None:
    prompts = {number: torch.tensor(row) for number, row in enumerate([*PROMPTS, *PROMPTS[::-1], [1, 2], [5]])}
    drafter = members(tmp_path)[member]
    found = polydraft.generate_many(target(), prompts, drafter=drafter, batch_size=2, max_new_tokens=12)
    for one in found:
        alone = polydraft.generate(target(), prompts[one.name].unsqueeze(0), drafter="none", max_new_tokens=12)
        assert one.tokens == alone.sequences[0, -12:].tolist()


def test_texts_that_are_over_are_added_once_prompt_and_all(tmp_path: Path) -> None:
    store = SuffixStore(tmp_path)
    output = generated(drafter=SuffixDrafter(store=store))
    assert store.texts == 3
    store.flush()
    kept = sorted(one.tokens[1:-1].tolist() for one in store.segments)
    rows = [row.tolist()[8 - len(prompt) :] for row, prompt in zip(output.sequences, PROMPTS, strict=True)]
    assert sorted(",".join(map(str, row)) for row in rows) == sorted(
        part.strip(",") for part in ",".join(map(str, kept[0])).split(str(0xFFFFFFFF))
    )
    many = polydraft.generate_many(
        target(), [torch.tensor(row) for row in PROMPTS], drafter=SuffixDrafter(store=store), max_new_tokens=5
    )
    assert len([*many]) == 3 and store.texts == 6
    generated(drafter=SuffixDrafter(store=store, keeps=False))
    assert store.texts == 6


def test_a_step_that_is_taken_again_adds_nothing(tmp_path: Path) -> None:
    store, text = SuffixStore(tmp_path), text_of([1, 2, 3], [4, 5, 6])
    drafter = SuffixDrafter(store=store)
    state = drafter.start(text, Session(SamplingParams(), 64, VOCAB))
    for _ in range(3):
        after = drafter.finish(state, text, 0)
    assert store.texts == 1
    assert not len(drafter.guesses(after, text_of([1, 1, 1], [4, 4, 4]), _bounds())[0][0]), "nobody takes its drafts"
    joined = put(after, 0, drafter.start(text_of([7, 7]), Session(SamplingParams(), 64, VOCAB)))
    drafter.finish(joined, text_of([7, 7, 7], [4, 5, 6]), 0)
    assert store.texts == 2
    assert store._buffer.index.tokens[:9].tolist() == [0xFFFFFFFF, 1, 2, 3, 0xFFFFFFFF, 7, 7, 7, 0xFFFFFFFF]


def _bounds() -> Any:
    from polydraft.drafters.text.guess import Bounds

    return Bounds(4, 4, 2)


def test_a_conversation_that_goes_on_adds_what_is_new(tmp_path: Path) -> None:
    store = SuffixStore(tmp_path)
    drafter, session = SuffixDrafter(store=store, longest=4), Session(SamplingParams(), 64, VOCAB)
    text = text_of([*range(1, 10)])
    state = drafter.finish(drafter.start(text, session), text, 0)
    longer = text_of([*range(1, 15)])
    went_on = resumed(drafter, state, 8, longer, session)
    drafter.finish(went_on, longer, 0)
    mark = 0xFFFFFFFF
    assert store._buffer.index.tokens[: store._buffer.used].tolist() == [mark, *range(1, 10), mark, *range(5, 15), mark]


@pytest.mark.parametrize(
    "around", [LookupFirst, lambda one: MergedDrafter((one,)), lambda one: RoutedDrafter((one,))], ids=range(3)
)
def test_drafters_around_it_hand_the_end_on(around: Callable[[SuffixDrafter], Drafter], tmp_path: Path) -> None:
    generated(drafter=around(SuffixDrafter(store=tmp_path / "store")))
    flush_stores()
    assert TextStore(tmp_path / "store").texts == 3


@pytest.mark.wrong_types
def test_words_name_drafters_and_their_stores(tmp_path: Path) -> None:
    plain = generated(drafter="none").sequences
    written(tmp_path / "read", *(row.tolist() for row in plain))
    for word in ("suffix", f"suffix:{tmp_path / 'growing'}", f"rest:{tmp_path / 'read'}"):
        found = generated(drafter=word)
        assert torch.equal(found.sequences, plain)
        assert torch.equal(generated(drafter=word, verifier="naive").sequences, plain)
    assert SuffixDrafter(store=tmp_path / "growing").store.texts == 6  # type: ignore[union-attr]
    for word in ("rest", "rest:", "rest: "):
        with pytest.raises(InvalidParameter, match="The drafter 'rest' needs a store: write rest:FOLDER"):
            generated(drafter=word)
    for word in ("suffix:", "suffix: "):
        with pytest.raises(InvalidParameter, match="no folder behind its colon: write suffix:FOLDER, or suffix alone"):
            generated(drafter=word)
    with pytest.raises(StoreError, match="There is no store of texts at"):
        generated(drafter=f"rest:{tmp_path / 'nowhere'}")
    with pytest.raises(InvalidParameter, match=r"one of ngram\[:N\], suffix\[:FOLDER\], rest:FOLDER, .*none, but is 3"):
        generated(drafter=3)


@pytest.mark.parametrize("kind", [SuffixDrafter, RetrievalDrafter])
def test_a_store_of_another_tokenizer_is_refused_before_anything_is_written(kind: Any, tmp_path: Path) -> None:
    place = written(tmp_path / "store", [1, 2, 3], vocab=5000)
    with pytest.raises(VocabularyMismatch, match=r"holds tokens of a tokenizer without a name \(5000 tokens\), and "):
        generated(drafter=kind(store=place))


def test_the_embedded_pair_knows_its_tokenizer(tmp_path: Path) -> None:
    pair = polydraft.load_pair()
    store = SuffixStore(tmp_path)
    ids = pair.tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    polydraft.generate(pair.target, ids, drafter=SuffixDrafter(store=store), max_new_tokens=8)
    assert store.vocabulary == StoreVocabulary.of(pair.tokenizer, pair.target.name_or_path)
    other = replace(store.vocabulary, mark=b"o" * 32, name="other")
    with pytest.raises(VocabularyMismatch, match=r"and the target's are those of other"):
        store.check(other)


@pytest.mark.parametrize("prompt", [[1, 0, 1, 1, 0], [2, 1, 0, 2]])
def test_the_law_of_texts_is_the_targets(prompt: list[int], tmp_path: Path) -> None:
    toy, policy = Toy(3, 0), Fixed(room_for_paths(5, 3, 2))
    store = SuffixStore(tmp_path / "growing")
    store.add([1, 0, 2, 1, 0, 1, 1, 0, 2, 2])
    read = written(tmp_path / "read", [0, 1, 1, 0, 1], [1, 0, 2, 2, 0], [0, 2, 1], vocab=3)
    for drafter in (
        SuffixDrafter(factor=3),
        SuffixDrafter(store=store, keeps=False, factor=2),
        RetrievalDrafter(read, shortest=1),
    ):
        law, failures = law_of(toy, drafter, TopDown(NaiveMatch(Given())), policy, [prompt], 3)
        assert not failures and distance(law, toy.texts(prompt, 3)) < 1e-12


@pytest.mark.slow
def test_sampled_texts_follow_the_law_while_the_store_grows(tmp_path: Path) -> None:
    model, store = tiny_model("llama", 5), SuffixStore(tmp_path)
    drafter = SuffixDrafter(store=store, factor=2)

    def texts(prompt: list[int], seed: int) -> list[int]:
        ids = torch.tensor([prompt])
        output: Any = polydraft.generate(
            model, ids, drafter=drafter, seed=seed, temperature=1.0, top_k=0, max_new_tokens=3
        )
        return output.sequences[0, len(prompt) :].tolist()

    report = check(texts, model, [[1, 2, 3, 1, 2], [4, 4]], new_tokens=3, most_samples=400)
    assert report.verdict != "deviates" and store.texts > 100


def test_guesses_are_those_of_both_places() -> None:
    guess = SuffixDrafter()._of(IndexedText().to(np.array([1, 2, 1, 2, 1, 2])), _bounds())
    assert isinstance(guess, Guess) and guess.tokens.tolist() == [1, 2, 1, 2][: len(guess)]
