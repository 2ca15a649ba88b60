"""Prompt lookup against a search written the slow and plain way."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from chatml import chat_tokenizer
from doubles import step_of, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from tool_models import WITHOUT_THOUGHTS

import polydraft
from polydraft.catalogue import drafter_line
from polydraft.cli.benchmark.arm_spelling import spell_arm
from polydraft.drafters import DraftRequest, LookaheadDrafter, NgramDrafter, Session, given_chain
from polydraft.drafters.text.guess import Bounds
from polydraft.drafters.text.index import IndexedText
from polydraft.drafters.text.ngram import continuations
from polydraft.errors import InvalidParameter
from polydraft.models import conversation_ids
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import Given
from polydraft.trees import Chain, Verdict

texts = st.lists(st.integers(0, 3), min_size=1, max_size=25)


def slow_continuations(text: list[int], longest: int, shortest: int, most: int, matches: int) -> list[list[int]]:
    """Try every suffix from the longest down and every place from the latest back; what is drafted may be copied on."""

    def copied(place: int, size: int) -> list[int]:
        whole = list(text)
        while len(whole) < len(text) + most and (size > 1 or place < len(text)):
            whole.append(whole[place])
            place += 1
        return whole[len(text) :]

    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix = text[len(text) - size :]
        starts = [start for start in range(len(text) - size - 1, -1, -1) if text[start : start + size] == suffix]
        if starts:
            return [copied(start + size, size) for start in starts[:matches]]
    return []


def found(text: list[int], longest: int = 3, shortest: int = 1, most: int = 4) -> list[int]:
    row = np.array(text, dtype=np.int64)
    _, chains = continuations(row, IndexedText().to(row), longest, shortest, most)
    return chains[0].tolist() if chains else []


@given(
    text=texts,
    longest=st.integers(1, 5),
    shortest=st.integers(1, 5),
    most=st.integers(1, 6),
    matches=st.integers(1, 4),
)
def test_agrees_with_the_slow_search(text: list[int], longest: int, shortest: int, most: int, matches: int) -> None:
    row = np.array(text, dtype=np.int64)
    size, chains = continuations(row, IndexedText().to(row), longest, shortest, most, matches)
    assert [chain.tolist() for chain in chains] == slow_continuations(text, longest, shortest, most, matches)
    assert bool(size) == bool(chains) and (not size or shortest <= size <= longest)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7], []),
        ([7, 8], []),
        ([7, 7], [7]),
        ([1, 2, 3, 9, 3, 5, 1, 2, 3], [9, 3, 5, 1]),  # the longest suffix wins over the more recent single token
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9]),  # the most recent occurrence wins; the text ends before four tokens
        ([4, 5, 4, 5, 4], [5, 4, 5, 4]),  # an occurrence may overlap the suffix
        ([1, 2, 9, 2], [9, 2]),  # a single token that agrees is no repetition
        ([1, 2, 3, 4], []),
    ],
)
def test_choice_of_the_occurrence(text: list[int], expected: list[int]) -> None:
    assert found(text) == expected


def test_suffixes_shorter_than_the_shortest_do_not_count() -> None:
    text = [1, 2, 9, 3, 2]
    assert found(text, shortest=1) == [9, 3, 2]
    assert found(text, shortest=2) == []


def drafted(rows: list[list[int]], length: int, vocab: int = 10) -> list[list[int]]:
    """Draft for a batch, check the laws that the drafts claim, and return the drafts of each row."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max()) + 3), 8)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    text = Text(tokens, lengths)
    drafter = NgramDrafter()
    state = drafter.start(text, Session(SamplingParams(), 64, vocab))
    draft, state = drafter.draft(state, DraftRequest(text, Given(), Chain(length), Noise.from_seed(0, len(rows))))
    tree = draft.tree
    assert tree.tokens[:, 0].tolist() == [row[-1] for row in rows]
    atoms = draft.drafted_atoms()
    counts = (atoms >= 0).sum(dim=-1)
    own = Given().sample(draft.probs, counts, torch.zeros_like(draft.probs), atoms.shape[-1])
    assert torch.equal(own, atoms)
    nothing = torch.full((len(rows), 0), -1)
    verdict = Verdict(nothing, torch.zeros_like(lengths), tokens[:, 0])
    assert drafter.commit(state, step_of(text, draft, verdict)) is state
    return [row[1:][valid[1:]].tolist() for row, valid in zip(tree.tokens, tree.valid, strict=True)]


def test_rows_of_a_batch_are_searched_apart() -> None:
    rows = [[1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6], [5], [4, 4, 4, 4]]
    assert drafted(rows, 4) == [[3, 1, 2, 3], [], [], [4, 4, 4, 4]]
    assert drafted(rows, 2) == [[3, 1], [], [], [4, 4]]
    assert drafted(rows[1:3], 4) == [[], []]


def test_nothing_beyond_the_target_vocabulary_is_drafted() -> None:
    assert drafted([[1, 9, 3, 1]], 4, vocab=10) == [[9, 3, 1]]
    assert drafted([[1, 9, 3, 1]], 4, vocab=9) == [[]], "what follows a missing token is no continuation"


def test_a_given_chain_of_nothing_is_the_root_alone() -> None:
    text = Text(torch.tensor([[1, 2]]), torch.tensor([2]))
    assert given_chain(text, [np.array([], dtype=np.int64)]).tree.tokens.tolist() == [[2]]


def test_calls_and_results_of_a_conversation_are_sources() -> None:
    """What begins like an earlier call, or like what a tool returned, is drafted as it went on there."""
    tokenizer = chat_tokenizer(WITHOUT_THOUGHTS)
    function = {"name": "find_orders", "arguments": {"customer": "C-2048", "state": "open"}}
    result = '{"order": "A-7001-19", "items": 2}'
    messages = [
        {"role": "user", "content": "Which orders are open?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result},
    ]
    told = conversation_ids(tokenizer, messages)
    for again in (json.dumps(function["arguments"]), result):
        tokens = tokenizer(again)["input_ids"][1:-1]
        assert f" {' '.join(map(str, tokens))} " in f" {' '.join(map(str, told))} "
        assert found([*told, *tokens[:4]], most=len(tokens) - 4) == tokens[4:]


def guessed(text: list[int], matches: int, bounds: Bounds) -> list[tuple[tuple[int, ...], float]]:
    """Return the paths that are drafted, in order, with their chances."""
    row = Text(torch.tensor([text]), torch.tensor([len(text)]))
    drafter = NgramDrafter(matches=matches)
    (guess,), _ = drafter.guesses(drafter.start(row, Session(SamplingParams(), 64, 10)), row, bounds)
    kept, paths = guess.within(bounds), list[tuple[int, ...]]()
    for token, above in zip(kept.tokens.tolist(), kept.parents.tolist(), strict=True):
        paths.append((*(paths[above] if above >= 0 else ()), token))
    return list(zip(paths, kept.chances.tolist(), strict=True))


BRANCHING = [1, 2, 5, 3, 1, 2, 6, 3, 1, 2, 5, 4, 1, 2]
"""After 1 2, from the latest back: 5 4, 6 3, 5 3."""


def test_several_matches_are_branches_the_latest_first() -> None:
    """Two tokens agree, so each token is kept with 3/4; the matches weigh 4/7, 2/7 and 1/7."""
    assert guessed(BRANCHING, 3, Bounds(9, 2, 3)) == [
        ((5,), pytest.approx(3 / 4 * 5 / 7)),
        ((5, 4), pytest.approx(9 / 16 * 4 / 7)),
        ((6,), pytest.approx(3 / 4 * 2 / 7)),
        ((6, 3), pytest.approx(9 / 16 * 2 / 7)),
        ((5, 3), pytest.approx(9 / 16 * 1 / 7)),
    ]


@pytest.mark.parametrize(
    ("matches", "bounds", "paths"),
    [
        (1, Bounds(9, 2, 3), [(5,), (5, 4)]),
        (2, Bounds(9, 2, 3), [(5,), (5, 4), (6,), (6, 3)]),
        (3, Bounds(9, 2, 1), [(5,), (5, 4)]),  # no branches: the latest alone
        (3, Bounds(3, 2, 3), [(5,), (5, 4), (6,)]),  # the likeliest three
        (9, Bounds(9, 1, 3), [(5,), (6,)]),  # more matches than there are
    ],
)
def test_numbers_and_bounds_choose_the_branches(matches: int, bounds: Bounds, paths: list[tuple[int, ...]]) -> None:
    assert [path for path, _ in guessed(BRANCHING, matches, bounds)] == paths


def test_one_match_has_the_chances_of_a_chain() -> None:
    assert [chance for _, chance in guessed(BRANCHING, 1, Bounds(9, 3, 1))] == pytest.approx([3 / 4, 9 / 16, 27 / 64])


def test_a_word_asks_for_several_matches() -> None:
    target = tiny_model("llama", 10)
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 30}
    ids = torch.tensor([BRANCHING])
    plain = polydraft.generate(target, ids, drafter="none", **options)
    drafted_trees = dict[str, int]()
    for word in ("ngram", "ngram:1", "ngram:3"):
        found = polydraft.generate(target, ids, drafter=word, **options)
        assert torch.equal(found.sequences, plain.sequences) and not found.statistics.fallback
        drafted_trees[word] = found.statistics.drafted
    assert drafted_trees["ngram"] == drafted_trees["ngram:1"]
    assert drafter_line("ngram:3").named("ngram:3") == NgramDrafter(matches=3)
    params = SamplingParams()
    assert NgramDrafter().defaults(params).policy == Chain(8)
    assert Bounds.of(NgramDrafter(matches=3).defaults(params).policy) == Bounds(8, 8, 3)
    assert Bounds.of(NgramDrafter(matches=99).defaults(params).policy).children == 8


@pytest.mark.parametrize("wrong", ["0", "x", "", " 3", "-1", "2.5", "\u0663", "1" * 5000])
def test_words_with_no_number_of_matches_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidParameter, match="'ngram' takes a whole number of matches behind its colon, from 1 to"):
        polydraft.generate(tiny_model("llama", 10), torch.tensor([[1, 2]]), drafter=f"ngram:{wrong}", max_new_tokens=2)


@pytest.mark.parametrize("wrong", ["0", "x"])
def test_arms_refuse_them_too(wrong: str) -> None:
    with pytest.raises(InvalidParameter, match="write ngram:3, or ngram alone"):
        spell_arm(f"drafter=ngram:{wrong}")


def test_a_word_gives_lookahead_its_three_numbers() -> None:
    line = drafter_line("lookahead:3,2,4")
    found, usual = line.named("lookahead:3,2,4"), line.named("lookahead")
    assert isinstance(found, LookaheadDrafter) and isinstance(usual, LookaheadDrafter)
    assert (found.level, found.window, found.guesses) == (3, 2, 4)
    assert spell_arm("drafter=lookahead:3,2,4 tree=chain:2").settings["drafter"] == "lookahead:3,2,4"
    for wrong in ("", "3", "3,2", "3,2,4,1", "3,,4", "3,0,4", "3,2,x"):
        with pytest.raises(InvalidParameter, match="takes 3 whole numbers, level, window, guesses, behind its colon"):
            line.named(f"lookahead:{wrong}")


@pytest.mark.wrong_types
@pytest.mark.parametrize("wrong", [(0,), (-1,), (2.5,), ("3",), (True,), (1, 2), (3, 1, 0), (3, 1, None)])
def test_numbers_that_are_none_are_refused(wrong: tuple) -> None:
    with pytest.raises(InvalidParameter, match="must be whole numbers of at least 1"):
        NgramDrafter(*wrong)
