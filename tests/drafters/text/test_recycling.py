"""Token recycling: what is learnt of a step, whom it belongs to, and the trees that are grown from it."""

from typing import Any

import pytest
import torch
from doubles import tiny_model

import polydraft
from polydraft.drafters import RecyclingDrafter, Session
from polydraft.drafters.text import recycling
from polydraft.drafters.text.guess import Bounds, given, rows_of
from polydraft.errors import InvalidParameter
from polydraft.probs import SamplingParams
from polydraft.reading import Scored, Step, Text
from polydraft.rows import cut
from polydraft.schemes import Given
from polydraft.trees import Verdict

VOCAB = 12
SESSION = Session(SamplingParams(temperature=0), 64, VOCAB)


def text_of(*rows: list[int]) -> Text:
    tokens = torch.zeros(len(rows), 16, dtype=torch.int64)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)
    return Text(tokens, torch.tensor([len(own) for own in rows]))


def step_with(text: Text, drafter: RecyclingDrafter, state, logits: torch.Tensor, path: list[int]) -> Step:
    guesses, _ = drafter.guesses(state, text, Bounds(4, 3, 2))
    draft = given(text, guesses, Given())
    rows = logits[:, : draft.tree.tokens.shape[1]]
    verdict = Verdict(torch.tensor([path]), torch.tensor([len(path)]), torch.tensor([0]))
    return Step(text, draft.tree, Scored(rows, None, {}, {}), rows.softmax(-1), verdict)


def test_a_prompt_says_what_followed_what() -> None:
    drafter, text = RecyclingDrafter(3), text_of([4, 5, 6, 4, 7, 4])
    state = drafter.read(drafter.start(text, SESSION), text, None)
    (guess,), _ = drafter.guesses(state, text, Bounds(3, 3, 3))
    assert guess.tokens.tolist() == [7, 4, 7]  # 4 was followed by 7 last, and 7 by 4


def test_a_prompt_in_chunks_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is that of the whole prompt, and as many pairs are looked at as the prompt has."""
    noise, seen = torch.Generator().manual_seed(4), list[int]()
    tokens = torch.randint(VOCAB, (2, 200), generator=noise)
    followed = recycling._followed

    def noted(row: Any, table: Any) -> Any:
        seen.append(len(row) - 1)
        return followed(row, table)

    monkeypatch.setattr(recycling, "_followed", noted)
    tables = []
    for cuts in ([200], [1, 2, 50, 51, 120, 200], [*range(1, 201)]):
        drafter, sizes = RecyclingDrafter(3), [torch.tensor([cut, min(cut, 90)]) for cut in cuts]
        state = drafter.start(Text(tokens, sizes[0]), SESSION)
        seen.clear()
        for lengths in sizes:
            state = drafter.read(state, Text(tokens, lengths), None)
        tables.append(state.tables)
        assert sum(seen) == 199 + 89
    assert tables[0] == tables[1] == tables[2]
    other = cut(state, 0, 3)
    again = drafter.read(other, Text(tokens.flip(1), sizes[-1]), None)
    assert again.tables[0] == {**state.tables[0], **followed(tokens.flip(1)[0, 2:].numpy(), {})}


def test_the_highest_logits_of_every_node_are_learnt_and_the_accepted_path_counts_most() -> None:
    drafter, text = RecyclingDrafter(2), text_of([4, 5, 4, 6, 4])
    state = drafter.read(drafter.start(text, SESSION), text, None)
    logits = torch.zeros(1, 5, VOCAB)
    for node in range(5):
        logits[0, node, (node + 1) % VOCAB], logits[0, node, (node + 3) % VOCAB] = 9.0, 5.0
    step = step_with(text, drafter, state, logits, [1])
    tokens = step.tree.tokens[0].tolist()
    after = drafter.commit(state, step)
    assert after.tables[0][tokens[1]] == (2, 4)
    assert state.tables[0][4] == (6,), "the state of before is as it was, so that a step may be taken again"
    assert drafter.commit(state, step).tables == after.tables


def test_texts_share_a_table_only_if_asked() -> None:
    for shared in (False, True):
        drafter = RecyclingDrafter(2, shared=shared)
        first, second = text_of([1, 2, 1]), text_of([1])
        drafter.read(drafter.start(first, SESSION), first, None)
        (guess,), _ = drafter.guesses(drafter.start(second, SESSION), second, Bounds(2, 2, 2))
        assert guess.tokens.tolist() == ([2, 1] if shared else [])


def test_paths_go_where_the_product_of_ranks_is_largest() -> None:
    drafter, text = RecyclingDrafter(2), text_of([0])
    state = drafter.start(text, SESSION)
    state.tables[0].update({0: (1, 2), 1: (3, 4), 3: (5,)})
    (guess,), _ = drafter.guesses(state, text, Bounds(5, 2, 2))
    assert guess.tokens.tolist()[:2] == [1, 3] and set(guess.tokens.tolist()) == {1, 2, 3, 4}
    assert (guess.chances[1:] <= guess.chances[:-1] + 1e-12).all()
    assert rows_of(text)[0].tolist() == [0]


def test_greedy_text_is_that_of_plain_decoding_in_batches_too() -> None:
    target = tiny_model("llama", 20)
    ids = torch.tensor([[3, 1, 4, 3, 1], [5, 8, 5, 8, 5]])
    options = {"temperature": 0, "max_new_tokens": 40}
    plain = polydraft.generate(target, ids, drafter="none", **options)
    for shared in (False, True):
        found = polydraft.generate(target, ids, drafter=RecyclingDrafter(shared=shared), **options)
        assert torch.equal(found.sequences, plain.sequences)
        assert found.statistics.block_efficiency > 1.2 and not found.statistics.fallback


@pytest.mark.wrong_types
def test_a_table_without_successors_is_refused() -> None:
    for wrong in (0, 2.5, "8", None):
        with pytest.raises(InvalidParameter, match="successors must be a whole number of at least 1"):
            RecyclingDrafter(wrong)  # type: ignore[arg-type]
