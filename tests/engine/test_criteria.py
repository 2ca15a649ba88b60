"""Stopping criteria are asked as Hugging Face's `generate` asks them: for all rows, once for each place."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

import polydraft
from polydraft import EAGLE_25, Chain, Fixed, GenerationOutput
from polydraft.errors import InvalidParameter
from polydraft.trees import TreePolicy

VOCAB, NEW, PAD = 30, 12, 0
ROWS = torch.tensor([[0, 0, 3, 1, 4], [9, 2, 6, 5, 3], [0, 8, 9, 7, 9]])
MASK = (ROWS > 0).long()
Answer = Callable[[Tensor, Any], Any]


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def draft() -> PreTrainedModel:
    return perturbed(target(), 0.05)


@cache
def spelt() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = tiny_tokenizer()
    return tiny_model("llama", len(tokenizer)), tokenizer


def options(rows: int = 3, **more: Any) -> dict[str, Any]:
    ids, mask = (ROWS, MASK) if rows == 3 else (ROWS[1:2], MASK[1:2])
    usual = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": NEW, "pad_token_id": PAD}
    return {**usual, "return_dict_in_generate": True, **more}


def by_hugging_face(rows: int = 3, **more: Any) -> Tensor:
    output = target().generate(**options(rows, **more))
    assert not isinstance(output, Tensor)
    return output.sequences


def ours(rows: int = 3, policy: TreePolicy | None = None, **more: Any) -> GenerationOutput:
    output = polydraft.generate(target(), drafter=draft(), policy=policy or Chain(3), **options(rows, **more))
    assert isinstance(output, GenerationOutput)
    return output


def ends() -> int:
    """Return a token that ends the first row and not yet the second."""
    written = by_hugging_face()[:, 5:]
    return next(int(one) for one in written[0, 2:] if one not in written[1, :6])


class Seeing(StoppingCriteria):
    """Keeps what it is shown, and ends nothing."""

    def __init__(self) -> None:
        self.shown: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.shown.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Third(MaxLengthCriteria):
    """Ends at the first token that three divides, not by length alone."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return super().__call__(input_ids, scores) | (input_ids[:, -1] % 3 == 0)


class SecondEnd(EosTokenCriteria):
    """Ends at the second token of the kind."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.isin(input_ids[:, 5:], self.eos_token_id).sum(-1) >= 2


class Soon(MaxTimeCriteria):
    """Ends by the number of tokens, whatever the time."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)


class UntilAllSaid(StoppingCriteria):
    """Ends all rows when each has said a word: as lm-evaluation-harness does, it keeps a list by row of the batch."""

    def __init__(self, words: list[int], begin: int, rows: int) -> None:
        self.words, self.begin, self.said = words, begin, [False] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        last = input_ids[:, self.begin :][:, -2:].tolist()
        for row, done in enumerate(self.said):
            self.said[row] = done or any(word in last[row] for word in self.words)
        return all(self.said)


class Numbered(StoppingCriteria):
    """Ends each row at a place of its own, by its number."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.arange(len(input_ids)) + 7 <= input_ids.shape[1]


class Sixth(StoppingCriteria):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 6)


class Sure(StoppingCriteria):
    """Ends where the last scores were sure, and keeps how many it was given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.given.append(len(scores))
        return torch.stack(tuple(scores), 1)[:, -1].max(-1).values > 0.9


MADE: dict[str, Callable[[], StoppingCriteria]] = {
    "length": lambda: Third(17),
    "eos": lambda: SecondEnd([15, 24]),
    "time": lambda: Soon(1000.0),
    "all said": lambda: UntilAllSaid([*range(8)], 5, 3),
    "by number": Numbered,
    "counting": Sixth,
}


@pytest.mark.parametrize("policy", [Chain(3), Fixed(EAGLE_25)], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", MADE)
def test_whatever_a_criterion_goes_by_rows_end_where_hugging_faces_do(kind: str, policy: TreePolicy) -> None:
    expected = by_hugging_face(stopping_criteria=StoppingCriteriaList([MADE[kind]()]), eos_token_id=29)
    output = ours(policy=policy, stopping_criteria=StoppingCriteriaList([MADE[kind]()]), eos_token_id=29)
    assert torch.equal(output.sequences, expected)
    assert "stop" in output.finish


@pytest.mark.parametrize("kind", ["length", "eos", "time"])
def test_a_class_derived_from_hugging_faces_is_asked_itself_for_one_row_too(kind: str) -> None:
    expected = by_hugging_face(1, stopping_criteria=[MADE[kind]()])
    assert torch.equal(ours(1, stopping_criteria=[MADE[kind]()]).sequences, expected)
    run = polydraft.generate_many(target(), [ROWS[1]], drafter=draft(), temperature=0, max_new_tokens=NEW,
                                  stopping_criteria=[MADE[kind]()])  # fmt: skip
    assert [one.tokens for one in run] == [expected[0, 5:].tolist()]


@pytest.mark.parametrize("eos", [True, False], ids=["an end", "no end"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_is_shown_every_place_once_with_all_rows(rows: int, eos: bool) -> None:
    """Rows that are over are padded, as Hugging Face pads them where texts have an end."""
    shown, seen = Seeing(), Seeing()
    more = {"eos_token_id": ends() if eos else None}
    by_hugging_face(rows, stopping_criteria=[shown], **more)
    output = ours(rows, stopping_criteria=[seen], **more)
    assert seen.shown == shown.shown
    assert seen.shown[-1] == output.sequences.tolist()
    assert not eos or rows == 1 or len({*output.finish}) == 2


def test_without_an_end_of_text_a_row_that_is_over_is_padded() -> None:
    """Hugging Face goes on with it there until all rows are over."""
    output = ours(stopping_criteria=[Numbered()])
    theirs = by_hugging_face(stopping_criteria=[Numbered()])
    assert output.sequences.shape == theirs.shape
    for row, (mine, hers) in enumerate(zip(output.sequences, theirs, strict=True)):
        over = len(mine) - 2 + row
        assert torch.equal(mine[:over], hers[:over]) and (mine[over:] == PAD).all()
    assert (theirs[0, -2:] != PAD).any()


def test_a_sampled_text_is_what_criteria_were_shown() -> None:
    for seed in range(8):
        seen = Seeing()
        output = ours(stopping_criteria=[seen], do_sample=True, temperature=1.0, top_k=0, seed=seed)
        assert seen.shown == [output.sequences[:, : 6 + place].tolist() for place in range(NEW)]


class Turning(LogitsProcessor):
    """Favours another token at each call, so that it must have been called once for each place of a row."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + 2.0 * (torch.arange(scores.shape[-1]) % 5 == self.calls % 5)


@pytest.mark.parametrize("name", ["model", "merge", "recycling", "lookahead", "self:skip=1"])
@pytest.mark.parametrize("turning", [False, True], ids=["", "with a processor that keeps state"])
def test_rows_that_go_on_in_step_have_their_own_texts(name: str, turning: bool) -> None:
    """What a row gives back is drafted, scored and processed again, whoever drafts."""
    more = {"logits_processor": LogitsProcessorList([Turning()])} if turning else {}
    expected = by_hugging_face(**more)
    more = {"logits_processor": LogitsProcessorList([Turning()])} if turning else {}
    own = options(stopping_criteria=[Seeing()], drafter=draft() if name == "model" else name, **more)
    run = polydraft.stream(target(), **{key: one for key, one in own.items() if key != "return_dict_in_generate"})
    for block in run:
        gained = {len(row.tokens) for row in block.rows.values()}
        assert len(gained) == 1 and all(
            row.accepted in (len(row.tokens), len(row.tokens) - 1) for row in block.rows.values()
        )
    assert torch.equal(run.sequences(ROWS, PAD), expected)


def test_a_criterion_counts_prompts_of_many_for_each() -> None:
    own = Sixth()
    run = polydraft.generate_many(target(), [[1, 2], [3, 4]], max_new_tokens=NEW, stopping_criteria=[own])
    assert [len(one.tokens) for one in run] == [6, 6]
    assert own.calls == 0
    ours(stopping_criteria=[own])
    assert own.calls == 6  # a batch is one call, and the criterion the user's own


@pytest.mark.parametrize("at", range(1, NEW, 3))
def test_a_place_is_shown_once_though_its_step_is_taken_again(at: int) -> None:
    seen, others = Seeing(), Seeing()

    class Stumbling(StoppingCriteria):
        left = at

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            self.left -= 1
            if not self.left:
                raise OSError("a stumble")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    criteria = [seen, Stumbling(), others]
    settings = options(stopping_criteria=criteria)
    del settings["return_dict_in_generate"]
    run = polydraft.stream(target(), drafter=draft(), policy=Chain(3), **settings)
    with pytest.raises(OSError, match="a stumble"):
        list(run)
    sequences = run.exhaust().sequences(ROWS, PAD)
    assert torch.equal(sequences, by_hugging_face())
    assert seen.shown == others.shown == [sequences[:, : 6 + place].tolist() for place in range(NEW)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("made", [Sure, lambda: ConfidenceCriteria(0.1)], ids=["sure", "confidence"])
def test_scores_are_given_as_hugging_face_gives_them(made: Callable[[], Any], rows: int) -> None:
    criterion, theirs = made(), made()
    expected = by_hugging_face(rows, stopping_criteria=[theirs], output_scores=True)
    output = ours(rows, stopping_criteria=[criterion], output_scores=True)
    width = output.sequences.shape[1]
    assert output.sequences.shape == expected.shape
    first = [row[: 5 + steps] for row, steps in zip(output.sequences, _lengths(output), strict=True)]
    assert all(torch.equal(one, other[: len(one)]) for one, other in zip(first, expected, strict=True))
    if isinstance(criterion, Sure):
        assert criterion.given == [*range(1, width - 4)]


def _lengths(output: GenerationOutput) -> list[int]:
    assert output.scores is not None
    return [sum(bool(step[row].any()) for step in output.scores) for row in range(len(output.sequences))]


def test_who_reads_scores_that_nobody_asked_for_is_told_how() -> None:
    with pytest.raises(InvalidParameter, match=r"criterion Sure failed.*ask for them by output_scores=True\.$"):
        ours(stopping_criteria=[Sure()])
    with pytest.raises(InvalidParameter, match="criterion Sure failed"):
        ours(stopping_criteria=[Sure()], output_logits=True)


RIGHT: dict[str, Answer] = {
    "bool": lambda ids, _: ids.shape[1] >= 8,
    "numpy": lambda ids, _: np.bool_(ids.shape[1] >= 8),
    "scalar": lambda ids, _: torch.tensor(ids.shape[1] >= 8),
    "one": lambda ids, _: torch.tensor([ids.shape[1] >= 8]),
    "rows": lambda ids, _: torch.full((len(ids),), ids.shape[1] >= 8),
    "column": lambda ids, _: torch.full((len(ids), 1), ids.shape[1] >= 8),
    "numbers": lambda ids, _: torch.full((len(ids),), int(ids.shape[1] >= 8)),
    "list": lambda ids, _: [ids.shape[1] >= 8] * len(ids),
}
WRONG: dict[str, Answer] = {
    "two": lambda ids, _: torch.tensor([True, False]),
    "scores": lambda ids, _: torch.zeros(len(ids)),
    "square": lambda ids, _: torch.zeros(len(ids), len(ids) + 1, dtype=torch.bool),
    "list": lambda ids, _: [True] * (len(ids) + 1),
    "numbers": lambda ids, _: [1.5] * len(ids),
    "nothing": lambda ids, _: None,
    "text": lambda ids, _: "yes",
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", RIGHT)
def test_answers_may_be_of_all_rows_or_of_each(kind: str, rows: int) -> None:
    output = ours(rows, stopping_criteria=[RIGHT[kind]])
    assert torch.equal(output.sequences, by_hugging_face(rows)[:, :8])
    assert output.finish == ("stop",) * rows


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", WRONG)
def test_other_answers_are_refused_by_name(kind: str, rows: int) -> None:
    with pytest.raises(InvalidParameter, match=f"<lambda> must return True or False for each row, here {rows}, but"):
        ours(rows, stopping_criteria=[WRONG[kind]])


def test_what_says_that_it_goes_by_the_row_is_asked_for_each_alone() -> None:
    class Alone(Seeing):
        stateless = True

    seen = Alone()
    assert torch.equal(ours(stopping_criteria=[seen]).sequences, by_hugging_face())
    assert {len(one) for one in seen.shown} == {1}
    assert len(seen.shown) == 3 * NEW


def test_hugging_faces_own_beside_ones_own() -> None:
    model, tokenizer = spelt()
    ids = torch.tensor([tokenizer(text).input_ids[:8] for text in ("a winter there", "some other words")])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    plain = model.generate(ids, **settings)
    word = tokenizer.decode(plain[0, ids.shape[1] + 6])
    seen = Seeing()
    made = StoppingCriteriaList([StopStringCriteria(tokenizer, word), MaxTimeCriteria(1000.0), seen])
    output = polydraft.generate(model, ids, drafter="ngram", stopping_criteria=made, **settings)
    assert isinstance(output, GenerationOutput)
    assert output.finish[0] == "stop"
    assert word in tokenizer.decode(output.sequences[0, ids.shape[1] :])
    assert seen.shown == [output.sequences[:, : ids.shape[1] + 1 + place].tolist() for place in range(len(seen.shown))]


# --- Processors of a class derived from Hugging Face's ---------------------------------------------------------------


class Forbidding(PrefixConstrainedLogitsProcessor):
    """Forbids a token beside what its base allows."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return super().__call__(input_ids, scores).index_fill(-1, torch.tensor([20, 15, 24]), -torch.inf)


class Twice(RepetitionPenaltyLogitsProcessor):
    """Punishes twice."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return super().__call__(input_ids, super().__call__(input_ids, scores))


class Reversing(LogitsProcessorList):
    """A list that is called in its own way."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return -super().__call__(input_ids, scores)


class Plain(LogitsProcessor):
    """Favours even tokens."""

    stateless = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (torch.arange(scores.shape[-1]) % 2 == 0)


@pytest.mark.parametrize(
    "made",
    [
        lambda: Forbidding(lambda row, text: [*range(row, VOCAB)], 1),
        lambda: Twice(1.5, torch.tensor([5, 2, 1])),
        lambda: Reversing([Plain()]),
    ],
    ids=["prefixes", "penalty", "list"],
)
def test_a_processor_derived_from_hugging_faces_is_asked_itself(made: Callable[[], Any]) -> None:
    expected = by_hugging_face(logits_processor=LogitsProcessorList([made()]))
    assert torch.equal(ours(logits_processor=LogitsProcessorList([made()])).sequences, expected)
