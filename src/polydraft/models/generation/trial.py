"""Trying out a processor that says nothing of itself: does its answer depend on its arguments alone?

The trial runs copies on the prompt and on a few tokens that the processor itself lets through, so that one which
follows a grammar is not led astray. It can be deceived by what shows up only later; a class can say what it is instead.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from hashlib import blake2b
from types import CellType, FunctionType, MethodType, ModuleType
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from transformers import PreTrainedTokenizerBase

from polydraft.probs import Noise

Call = Callable[..., Tensor]
STEPS = 4
"""How many tokens of text a processor is tried on."""
AGAIN = 24
"""How often it is asked the same, so that one which counts its calls has counted some."""
DEEPEST = 8
"""How deep a processor's fields are looked into for what has changed."""


class Behaviour(Enum):
    """What a trial says of a processor."""

    stateless = "its answer depends on its arguments alone"
    forkable = "it keeps state, and a copy of it goes its own way"
    serial = "it keeps state that cannot be copied, or it cannot be tried"


class Asked(NamedTuple):
    """A text, another of the same length that ends otherwise, and scores."""

    text: Int[Tensor, "1 t"]
    other: Int[Tensor, "1 t"]
    scores: Float[Tensor, "1 V"]


def behaviour(
    processor: Call, forked: Callable[[Call], Call], prompt: Int[Tensor, "1 t"], vocab_size: int
) -> Behaviour:
    """Return what a processor is, found out by copies of it; torch's global random numbers are left as they were.

    Rule: two copies led along the same text must give the same answers, and leave the original as it is, else the
    processor is serial. A third is asked in another order, the same again and again, and for two rows at once. If all
    its answers are those of the first, and its fields stay what they were, it is stateless; else it is forkable.

    Args:
        processor: the processor.
        forked: copies it.
        prompt: the text that it is tried on.
        vocab_size: the number of scores.
    """
    before = traces(processor)
    with torch.random.fork_rng(devices=[]):
        try:
            asked, answers = _led(forked(processor), prompt, vocab_size)
            twin = forked(processor)
            repeated = [_answer(twin, one.text, one.scores) for one in asked]
        except Exception:  # noqa: BLE001  what cannot be copied, or not be called like this, is not tried
            return Behaviour.serial
        if traces(processor) != before or not _alike(answers, repeated):
            return Behaviour.serial
        return Behaviour.stateless if _is_stateless(forked(processor), asked, answers) else Behaviour.forkable


def _led(twin: Call, prompt: Int[Tensor, "1 t"], vocab_size: int) -> tuple[list[Asked], list[Tensor]]:
    """Lead a copy along a text of its own choice; return what it was asked and what it answered."""
    (numbers,) = Noise.from_seed(0, 1).generators
    asked, answers, text, other = list[Asked](), list[Tensor](), prompt, prompt
    for _ in range(STEPS):
        scores = torch.randn(1, vocab_size, generator=numbers).to(prompt.device)
        asked.append(Asked(text, other, scores))
        answers.append(_answer(twin, text, scores))
        likeliest = answers[-1].argsort(dim=-1, descending=True)[:, :2]
        other, text = (torch.cat([text, token], dim=-1) for token in (likeliest[:, -1:], likeliest[:, :1]))
    return asked, answers


def _is_stateless(twin: Call, asked: list[Asked], answers: list[Tensor]) -> bool:
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


def traces(value: object, deepest: int = DEEPEST) -> object:
    """Return what can be seen of a value's state, to be compared with what is seen later; models do not count."""
    if value is None or isinstance(value, bool | int | str | bytes | Enum):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), _digest(value)
    if isinstance(value, Generator):
        return _digest(value.get_state())
    if deepest == 0 or isinstance(value, nn.Module | PreTrainedTokenizerBase | ModuleType | type):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return [(traces(name, deepest - 1), traces(one, deepest - 1)) for name, one in items]
    if isinstance(value, list | tuple | set | frozenset):
        return [traces(one, deepest - 1) for one in cast(Iterable[object], value)]
    return type(value).__qualname__, [traces(one, deepest - 1) for one in _parts(value)]


def _parts(value: object) -> list[object]:
    """Return what a function or an object of any other class holds."""
    if isinstance(value, FunctionType):
        return [*map(_contents, value.__closure__ or ()), value.__defaults__, value.__dict__]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(value, "__dict__", None), *(getattr(value, name, None) for name in slots)]


def _contents(cell: CellType) -> object:
    """Return what a closure's variable holds; nothing if it was not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's numbers."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
