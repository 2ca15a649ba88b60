"""Lookahead decoding against the published algorithm, written out with one plain pass per token, without masks."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from doubles import plain_logits, tiny_model

import polydraft
from polydraft import HuggingFaceModel, LookaheadDrafter, NaiveMatch, NgramPool, TopDown
from polydraft.drafters import DraftRequest, Session
from polydraft.drafters.text.lookahead import LookaheadState, Window, layout, most_scored
from polydraft.engine.loop.step import LOOP
from polydraft.errors import InvalidParameter, UnpairedScheme, UnsupportedModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.rows import cut
from polydraft.schemes import Given, TopK
from polydraft.trees import Chain, TreePolicy, Widths

VOCAB, STEPS = 10, 14
RULE = TopDown(NaiveMatch(Given()))
PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 7, 2, 7, 2, 7, 1]]
SIZES = [(5, 3, 2), (3, 4, 3), (4, 1, 2), (2, 3, 2), (2, 1, 1), (6, 2, 3)]


@cache
def model() -> HuggingFaceModel:
    return HuggingFaceModel(tiny_model("llama", VOCAB, seed=3))


@cache
def likeliest(*text: int) -> int:
    return int(plain_logits(model().model, text).argmax())


class Published:
    """The published algorithm for one text at temperature 0.

    What a token of the window sees is a text: the committed one, row 0 up to its column, then its column downward. So
    its logits are those of a plain pass.
    """

    def __init__(self, prompt: list[int], level: int, width: int, most: int, from_prompt: bool) -> None:
        self.text, self.level, self.width, self.most, self.from_prompt = list(prompt), level, width, most, from_prompt
        (first,) = Window.begun(np.array(prompt, np.int64), level, width).rows
        self.past: list[list[int]] = [list(first)]
        self.map: dict[int, list[tuple[int, ...]]] = {}
        for end in range(level, len(prompt) + 1 if from_prompt else 0):
            self.insert(prompt[end - level], tuple(prompt[end - level + 1 : end]))

    def insert(self, key: int, value: tuple[int, ...]) -> None:
        known = self.map.setdefault(key, [])
        if value in known:
            known.remove(value)
        elif len(known) == self.most:
            known.pop(0)
        known.append(value)

    def output(self, row: int, column: int) -> int:
        """Return the likeliest token behind a token of the window; column 0 of row 0 is the current token."""
        below = [self.past[one][column] for one in range(1, row + 1)]
        return likeliest(*self.text, *self.past[0][:column], *below)

    def step(self) -> None:
        current, fill = self.text[-1], len(self.past) - 1
        if fill < self.level - 2:
            if fill == 0:
                new = [self.output(0, column) for column in range(1, len(self.past[0]) + 1)]
            else:
                new = [self.output(fill, column) for column in range(len(self.past[fill]))][1:]
            rows = [row[1:] for row in self.past] if fill else [self.past[0][1:]]
            self.past = [*rows, new]
            self.emit([likeliest(*self.text)])
            return
        best = list[int]()
        for guess in self.map.get(current, []):
            kept = 0
            while kept < len(guess) and likeliest(*self.text, *guess[:kept]) == guess[kept]:
                kept += 1
            best = max(best, list(guess[:kept]), key=len)
        new = [self.output(fill, column) for column in range(self.width)]
        for column in range(self.width):
            key = current if column == 0 else self.past[0][column - 1]
            self.insert(key, (*(self.past[row][column] for row in range(1, self.level - 1)), new[column]))
        rows = [*self.past[1:], new]
        self.past = [rows[0][1:], *rows[1:]]
        self.emit([*best, likeliest(*self.text, *best)])

    def emit(self, tokens: list[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if self.from_prompt and len(self.text) >= self.level:
                self.insert(self.text[-self.level], tuple(self.text[-self.level + 1 :]))


def text_of(rows: list[list[int]], width: int = 8) -> Text:
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def begun(drafter: LookaheadDrafter, rows: list[list[int]], policy: TreePolicy | None = None) -> Any:
    params = SamplingParams(temperature=0)
    policy = policy or drafter.defaults(params).policy
    session = Session(params, 120, VOCAB)
    return LOOP.begin(model(), drafter, RULE, policy, text_of(rows), session)


def check(loop: Any, row: int, published: Published) -> None:
    state: LookaheadState = LOOP.drafts(loop)
    text, own = loop.text, state.rows[row]
    assert text.tokens[row, : text.counts[row]].tolist() == published.text
    assert [*map(list, own.window.rows)] == published.past
    pool = own.pool
    if published.from_prompt:  # the text's last n-grams come into the pool with the next draft
        pool = (
            LookaheadDrafter(published.level, published.width, published.most, True)
            ._read(own, np.array(published.text, np.int64))
            .pool
        )
    assert {key: [one.tokens for one in entries] for key, entries in pool.entries.items()} == published.map


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("from_prompt", [False, True])
def test_text_window_and_pool_are_the_published_ones_in_every_row(
    sizes: tuple[int, int, int], from_prompt: bool
) -> None:
    loop = begun(LookaheadDrafter(*sizes, from_prompt), PROMPTS)
    published, kept = [Published(prompt, *sizes, from_prompt) for prompt in PROMPTS], 0
    for _ in range(STEPS):
        loop, taken = LOOP.step(loop)
        kept += sum(taken.verdict.kept)
        for row, one in enumerate(published):
            one.step()
            check(loop, row, one)
    assert kept > 0


def test_a_newcomer_fills_its_window_while_the_others_have_theirs() -> None:
    drafter, sizes = LookaheadDrafter(4, 3, 2), (4, 3, 2, False)
    loop, published = begun(drafter, PROMPTS), [Published(prompt, *sizes) for prompt in PROMPTS]
    for number in range(9):
        if number == 4:
            policy = loop.parts[0].method.policy
            loop = loop.put(1, begun(drafter, [[9, 9, 4]], policy))
            published[1] = Published([9, 9, 4], *sizes)
        rows = LOOP.drafts(loop).rows if number else ()
        assert number != 5 or len({len(row.window.rows) for row in rows}) == 2
        loop, _ = LOOP.step(loop)
        for row, one in enumerate(published):
            one.step()
            if not (number < 4 and row == 1):
                check(loop, row, one)


@pytest.mark.parametrize(("level", "width"), [(5, 7), (3, 2), (2, 4), (6, 1)])
def test_the_layout_is_the_official_one(level: int, width: int) -> None:
    """Positions and masks as read in the official code: one list of tokens, row by row, the current token first."""
    for rows in range(1, level):
        columns = width + level - 1 - rows
        order = [(row, column) for row in range(rows) for column in range(columns)]
        positions, mask = list[int](), list[list[bool]]()
        for row, column in order:
            positions.append(row + column)
            seen = []
            for other, place in order:
                lower_triangle = other == 0 and place <= column
                diagonal = 1 <= other <= row and place == column
                seen.append(lower_triangle or diagonal)
            mask.append(seen)
        own = layout(rows, columns)
        assert own.places.tolist() == positions[1:]
        assert own.sees.tolist() == mask[1:]
        assert mask[0] == [True] + [False] * (len(order) - 1), "the current token sees nothing of the window"
    if (level, width) == (5, 7):
        assert len(layout(4, 7).places) == 4 * 7 - 1


@pytest.mark.parametrize("level", range(2, 9))
@pytest.mark.parametrize("width", [1, 2, 5, 9])
def test_no_step_has_more_riders_than_announced(level: int, width: int) -> None:
    drafter, window, sizes = LookaheadDrafter(level, width), Window.begun(np.array([1, 2]), level, width), list[int]()
    for _ in range(level + 2):
        sizes.append(len(window.tokens))
        window, phrases = window.advanced(level, 0, [1] * window.columns)
        assert len(phrases) == (width if len(sizes) > level - 2 else 0)
    assert max(sizes) == drafter.needs.riders == most_scored(level, width)
    assert sizes[-1] == (level - 1) * width - 1 and sizes[0] == width + level - 3


def test_a_full_match_brings_the_targets_own_token_too() -> None:
    """The official code loses it: its loop ends with the last guess."""
    text = list(PROMPTS[0])
    for _ in range(3):
        text.append(likeliest(*text))
    pool = NgramPool(4, 2).added([(PROMPTS[0][-1], tuple(text[-3:]))])
    loop = begun(LookaheadDrafter(4, 2, 2, pool=pool), [PROMPTS[0]])
    for _ in range(2):  # the window fills first
        loop, taken = LOOP.step(loop)
        assert taken.tree.tokens.shape[1] == 1
    tail = loop.text.tokens[0, : loop.text.counts[0]].tolist()
    whole = list(tail)
    for _ in range(4):
        whole.append(likeliest(*whole))
    state = LOOP.drafts(loop)
    knowing = replace(state.rows[0], pool=pool.added([(tail[-1], tuple(whole[len(tail) :][:3]))]))
    loop = LOOP.drafting(loop, replace(state, rows=(knowing,)))
    loop, taken = LOOP.step(loop)
    assert taken.verdict.kept == (3,)
    assert loop.text.tokens[0, : loop.text.counts[0]].tolist() == whole


def test_a_window_begins_with_tokens_of_the_prompt_and_with_the_same_ones_again() -> None:
    prompt = np.array([5, 6, 7, 6], np.int64)
    first, again = (Window.begun(prompt, 5, 40) for _ in range(2))
    assert first == again and {*first.tokens} == {5, 6, 7} and len(first.tokens) == 42
    assert first != Window.begun(prompt[:3], 5, 40)


def test_windows_and_guesses_go_where_a_batch_is_full() -> None:
    """(N - 1)(W + G) tokens for each row may not be more than `most_scored`; then G alone, as far as they fit in."""
    drafter = LookaheadDrafter(5, 7, 7, most_scored=112)  # 56 tokens a row
    found = [drafter.sizes(rows) for rows in (1, 2, 3, 4, 9, 14, 28, 29)]
    assert found == [(True, 7), (True, 7), (False, 7), (False, 7), (False, 3), (False, 2), (False, 1), (False, 0)]
    assert LookaheadDrafter(most_scored=0).sizes(1) == (False, 0)


def test_a_row_in_a_full_batch_is_decoded_without_a_window_and_goes_on_with_it_later() -> None:
    drafter, sizes = LookaheadDrafter(3, 2, 2, True, most_scored=2 * 4 * 2), (3, 2, 2, True)
    loop, published = begun(drafter, PROMPTS[:2]), Published(PROMPTS[0], *sizes)
    for _ in range(5):
        loop, taken = LOOP.step(loop)
        published.step()
        assert taken.scored.riders is not None
    check(loop, 0, published)
    before = LOOP.drafts(loop).rows[0].window
    loop = loop.put(2, begun(drafter, [[9, 9, 4, 9, 9]], loop.parts[0].method.policy))
    kept = 0
    for _ in range(4):
        loop, taken = LOOP.step(loop)
        kept += sum(taken.verdict.kept)
        assert taken.scored.riders is None and taken.tree.tokens.shape[1] <= 5
    assert LOOP.drafts(loop).rows[0].window == before
    text = loop.text
    for row in range(3):
        written = text.tokens[row, : text.counts[row]].tolist()
        assert all(likeliest(*written[:place]) == written[place] for place in range(len(written) - 4, len(written)))


def test_the_same_state_gives_the_same_draft_again() -> None:
    drafter, text, noise = LookaheadDrafter(3, 3, 2, True), text_of(PROMPTS), Noise.from_seed(1, len(PROMPTS))
    state = drafter.start(text, Session(SamplingParams(), 64, VOCAB))
    drafts = [drafter.draft(state, DraftRequest(text, Given(), Widths((2, 1)), noise))[0] for _ in range(2)]
    assert torch.equal(drafts[0].tree.tokens, drafts[1].tree.tokens)
    riders = [draft.riders for draft in drafts]
    assert riders[0] is not None and riders[1] is not None
    assert torch.equal(riders[0].tokens, riders[1].tokens) and torch.equal(riders[0].sees, riders[1].sees)
    assert all(not row.window.rows and not len(row.pool) for row in state.rows)


def test_nothing_is_scored_where_nothing_is_to_be_drafted() -> None:
    class Nothing(Chain):
        @property
        def shape(self) -> Any:
            return polydraft.TreeShape(())

    drafter, text = LookaheadDrafter(), text_of(PROMPTS)
    state = drafter.start(text, Session(SamplingParams(), 64, VOCAB))
    draft, after = drafter.draft(state, DraftRequest(text, Given(), Nothing(1), Noise.from_seed(0, 3)))
    assert draft.riders is None and draft.tree.tokens.shape[1] == 1 and not after.rides


def test_what_is_kept_when_a_row_is_rewound_and_when_it_leaves() -> None:
    drafter = LookaheadDrafter(3, 3, 2, True)
    loop = begun(drafter, PROMPTS)
    for _ in range(4):
        loop, _ = LOOP.step(loop)
    state = LOOP.drafts(loop)
    back = cut(state, 0, 2)
    assert back.rows[0].read == 2 and back.rows[0].pool is state.rows[0].pool and back.rows[1] is state.rows[1]
    gone = cut(state, 0, 0).rows[0]
    assert not gone.window.rows and not len(gone.pool) and gone.read == 0
    assert not callable(getattr(state, "resumes", None)), "another text begins anew"


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "level": (lambda: LookaheadDrafter(level=1), "level must be an integer of at least 2, but is 1"),
    "window": (lambda: LookaheadDrafter(window=-3), "window must be an integer of at least 1, but is -3"),
    "guesses": (lambda: LookaheadDrafter(guesses=0), "guesses must be an integer of at least 1, but is 0"),
    "too many": (
        lambda: LookaheadDrafter(level=5, guesses=2000),
        "may have 4095 tokens each, but level 5, window 4 and",
    ),
    "most_scored": (lambda: LookaheadDrafter(most_scored=-1), "most_scored must be an integer of at least 0"),
    "pool": (lambda: LookaheadDrafter(level=4, pool=NgramPool(3, 2)), "has n-grams of 3 tokens, but level is 4"),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=[*REFUSED])
def test_bad_numbers(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=sentence):
        make()


def test_what_a_call_refuses() -> None:
    ids = torch.tensor([[3, 1, 4]])
    with pytest.raises(InvalidParameter, match=r"lookahead needs 159 tokens scored beside .* context has 128"):
        polydraft.generate(model().model, ids, drafter=LookaheadDrafter(5, 40), max_new_tokens=4)
    with pytest.raises(UnsupportedModel, match=r"Bloom.* scores chains only, but lookahead needs tokens scored beside"):
        polydraft.generate(tiny_model("bloom", VOCAB), ids, drafter="lookahead", max_new_tokens=4)
    with pytest.raises(UnpairedScheme, match="The lookahead drafter works with drafts that are given, not top-k"):
        LookaheadDrafter().check(TopK())
