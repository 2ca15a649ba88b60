"""Trying out a processor that says nothing of itself: does its answer depend on its arguments alone?

The trial runs copies on the prompt and on a few tokens that the processor itself lets through, so that one which
follows a grammar is not led astray. It can be deceived by what shows up only later; a class can say what it is instead.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from threading import RLock
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models.generation.traces import Shared, may_keep_state, traces
from polydraft.probs import Noise

Call = Callable[..., Tensor]
STEPS = 4
"""How many tokens of text a processor is tried on."""
AGAIN = 24
"""How often it is asked the same, so that one which counts its calls has counted some."""

ONE_AT_A_TIME = RLock()
"""A trial puts random numbers and shared variables back, which would undo what another thread's does meanwhile."""


class Behaviour(Enum):
    """What a trial says of a processor."""

    stateless = "its answer depends on its arguments alone"
    forkable = "it keeps state, and a copy of it goes its own way"
    mixing = "it keeps state or not, but its answers for a row depend on the rows beside it, or on the row's number"
    serial = "it keeps state that cannot be copied, or it cannot be tried"


class Question(NamedTuple):
    """A text, another of the same length that ends otherwise, and scores."""

    text: Int[Tensor, "1 t"]
    other: Int[Tensor, "1 t"]
    scores: Float[Tensor, "1 V"]


def behaviour(
    processor: Call, forked: Callable[[Call], Call], prompt: Int[Tensor, "1 t"], vocab_size: int
) -> Behaviour:
    """Return what a processor is, found out by copies of it; torch's global random numbers are left as they were.

    Rule: two copies led along the same text must give the same answers, and leave the original and what copies share
    as it is (`Shared`, which is put back), else the processor is serial. Two texts side by side must get the answers
    that each gets alone, else it mixes rows. One whose fields or code could keep something is forkable. Any other is
    asked in another order, the same again and again, and for two rows at once: if all answers are those of the first,
    it is stateless.

    Args:
        processor: the processor.
        forked: copies it.
        prompt: the text that it is tried on.
        vocab_size: the number of scores.
    """
    with ONE_AT_A_TIME:
        before, shared = traces(processor), Shared(processor)
        with torch.random.fork_rng(devices=[]):
            found = _tried(processor, forked, prompt, vocab_size)
        return Behaviour.serial if shared.put_back() or traces(processor) != before else found


def failure(
    processor: Call, forked: Callable[[Call], Call], prompt: Int[Tensor, "1 t"], vocab_size: int
) -> Exception | None:
    """Return the error with which a copy of a processor fails in the trial; None if it does not, or is no copy.

    Arguments are those of `behaviour`.
    """
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        shared = Shared(processor)
        try:
            twin = forked(processor)
        except Exception:  # noqa: BLE001  what cannot be copied is not tried
            return None
        try:
            if twin is not processor:
                _led(twin, prompt, vocab_size, 0)
        except Exception as error:  # noqa: BLE001  any error is its reason
            return error
        finally:
            shared.put_back()
    return None


def _tried(processor: Call, forked: Callable[[Call], Call], prompt: Int[Tensor, "1 t"], vocab_size: int) -> Behaviour:
    try:
        if forked(processor) is processor and may_keep_state(processor):
            return Behaviour.serial
        asked, answers = _led(forked(processor), prompt, vocab_size, 0)
        twin = forked(processor)
        repeated = [_answer(twin, one.text, one.scores) for one in asked]
    except Exception:  # noqa: BLE001  what cannot be copied, or not be called like this, is not tried
        return Behaviour.serial
    if not _alike(answers, repeated):
        return Behaviour.serial
    if not _serves_rows(forked, processor, (asked, answers), prompt, vocab_size):
        return Behaviour.mixing
    stateless = not may_keep_state(processor) and _is_stateless(forked(processor), asked, answers)
    return Behaviour.stateless if stateless else Behaviour.forkable


def _serves_rows(
    forked: Callable[[Call], Call],
    processor: Call,
    led: tuple[list[Question], list[Tensor]],
    prompt: Int[Tensor, "1 t"],
    vocab_size: int,
) -> bool:
    """Tell whether two texts side by side get the answers that each gets alone."""
    try:
        others, theirs = _led(forked(processor), prompt, vocab_size, 1)
        twin = forked(processor)
        pairs = list(zip(led[0], others, strict=True))
        texts = [(torch.cat([a.text, b.text]), torch.cat([a.scores, b.scores])) for a, b in pairs]
        together = [twin(text, scores).clone() for text, scores in texts]
    except Exception:  # noqa: BLE001  it insists on one row
        return False
    return _alike([torch.cat(pair) for pair in zip(led[1], theirs, strict=True)], together)


def _led(twin: Call, prompt: Int[Tensor, "1 t"], vocab_size: int, seed: int) -> tuple[list[Question], list[Tensor]]:
    """Lead a copy along a text of its own choice; return what it was asked and what it answered."""
    (numbers,) = Noise.from_seed(seed, 1).generators
    asked, answers, text, other = list[Question](), list[Tensor](), prompt, prompt
    for _ in range(STEPS):
        scores = torch.randn(1, vocab_size, generator=numbers).to(prompt.device)
        asked.append(Question(text, other, scores))
        answers.append(_answer(twin, text, scores))
        likeliest = answers[-1].argsort(dim=-1, descending=True)[:, :2]
        other, text = (torch.cat([text, token], dim=-1) for token in (likeliest[:, -1:], likeliest[:, :1]))
    return asked, answers


def _is_stateless(twin: Call, asked: list[Question], answers: list[Tensor]) -> bool:
    """Tell whether a copy gives the same answers in any order, any number of times, and to several rows at once."""
    before = traces(twin)
    try:
        backwards = [_answer(twin, one.text, one.scores) for one in reversed(asked)][::-1]
        again = [_answer(twin, asked[1].text, asked[1].scores) for _ in range(AGAIN)]
        rows = [twin(torch.cat([one.text, one.other]), torch.cat([one.scores, one.scores])) for one in asked]
        others = [_answer(twin, one.other, one.scores) for one in asked]
    except Exception:  # noqa: BLE001  it insists on its order, or on its number of rows
        return False
    together = [torch.cat(pair) for pair in zip(answers, others, strict=True)]
    return (
        traces(twin) == before
        and _alike(answers, backwards)
        and _alike([answers[1]] * AGAIN, again)
        and _alike(together, rows)
    )


def _answer(processor: Call, text: Int[Tensor, "1 t"], scores: Float[Tensor, "1 V"]) -> Tensor:
    """Return a processor's answer, which it may not change any more."""
    return processor(text.clone(), scores.clone()).clone()


def _alike(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Tell whether answers are the same up to rounding: several rows may be computed in another order."""
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )
