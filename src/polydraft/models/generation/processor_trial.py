"""Trying out a processor that says nothing of itself: does its answer depend on its arguments alone?

The trial runs copies on the prompt and on a few tokens that the processor itself lets through, so that one which
follows a grammar is not led astray. It can be deceived by what shows up only later; a class can say what it is instead.
"""

import array
import copy
import dis
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from hashlib import blake2b
from threading import RLock
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from transformers import PreTrainedTokenizerBase

from polydraft.probs import Noise

DEEPEST_CALLED = 6
"""How deep a processor is looked into for functions."""
LIBRARIES = ("builtins", "polydraft", "torch", "transformers", "numpy", "abc", "typing")
STORES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL"))
"""Operations by which a function keeps something for its next call."""
FIXED = (type(None), bool, int, float, complex, str, bytes, type, range, nn.Module, PreTrainedTokenizerBase, ModuleType)
Variable = tuple[Callable[[], Any], Callable[[Any], None]]


class Shared:
    """The shared variables of a processor, and the random numbers of Python and NumPy, as they are now."""

    def __init__(self, processor: object) -> None:
        self._saved = [(read, write, *_noted(read())) for read, write in _variables(processor)]
        self._random, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  the users' global state

    def put_back(self) -> bool:
        """Put everything back as it was; return whether a variable had changed."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)  # noqa: NPY002
        changed = [one for one in self._saved if traces(one[0]()) != one[3]]
        for read, write, value, _ in changed:
            _restore(read(), value, write)
        return bool(changed)


def may_keep_state(processor: object) -> bool:
    """Tell whether a processor could keep something: it has fields that can change, or code that stores."""
    fields: Mapping[str, Any] = getattr(processor, "__dict__", None) or {}
    changeable = any(not _is_fixed(value) for value in fields.values())
    changeable |= isinstance(processor, FunctionType) and not _is_fixed(processor)
    return changeable or any(_stores(one.__code__) for one in _functions(processor) if one.__name__ != "__init__")


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_fixed(one) for one in cast(tuple[object, ...], value))
    if isinstance(value, partial):
        return all(map(_is_fixed, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, FunctionType):  # what it stores by itself is looked for in its code
        own = (*map(_contents, value.__closure__ or ()), *(value.__defaults__ or ()))
        return _of_library(value) or all(map(_is_fixed, own))
    return isinstance(value, FIXED) or isinstance(value, torch.Tensor)


def _stores(code: CodeType) -> bool:
    """Tell whether code, or code within it, stores into attributes or outer variables."""
    if any(one.opname in STORES and one.argval not in code.co_cellvars for one in dis.get_instructions(code)):
        return True
    return any(_stores(one) for one in code.co_consts if isinstance(one, CodeType))


def _variables(processor: object) -> Iterator[Variable]:
    for kind in type(processor).__mro__:
        if not _of_library(kind):
            for name, value in list(vars(kind).items()):
                if not name.startswith("__") and not callable(value) and not isinstance(value, property | staticmethod):
                    yield partial(getattr, kind, name), partial(setattr, kind, name)
    for function in _functions(processor):
        yield from _variables_of(function)


def _variables_of(function: FunctionType) -> Iterator[Variable]:
    for cell in function.__closure__ or ():
        yield partial(_contents, cell), partial(setattr, cell, "cell_contents")
    yield partial(getattr, function, "__defaults__"), partial(setattr, function, "__defaults__")
    yield partial(getattr, function, "__kwdefaults__"), partial(setattr, function, "__kwdefaults__")
    yield partial(getattr, function, "__dict__"), function.__dict__.update
    space = function.__globals__
    for name in function.__code__.co_names:
        if name in space and not callable(space[name]) and not isinstance(space[name], ModuleType):
            yield partial(space.get, name), partial(space.__setitem__, name)


def _functions(value: object, deepest: int = DEEPEST_CALLED, seen: set[int] | None = None) -> Iterator[FunctionType]:
    """Yield the functions of users that a processor consists of or refers to."""
    seen = set() if seen is None else seen
    if deepest == 0 or id(value) in seen or isinstance(value, FIXED):
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        if _of_library(value):
            return
        yield value
        parts: list[object] = [_contents(cell) for cell in value.__closure__ or ()]
        parts += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Mapping):
        parts = list(cast(Mapping[object, object], value).values())
    elif isinstance(value, list | tuple | set):
        parts = list(cast(list[object], value))
    else:
        kinds = [kind for kind in type(value).__mro__ if not _of_library(kind)]
        parts = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
        parts += list((getattr(value, "__dict__", None) or {}).values())
    for part in parts:
        yield from _functions(part, deepest - 1, seen)


def _of_library(maker: FunctionType | type) -> bool:
    """Tell whether a function or class is one of the libraries', which keep nothing in their variables."""
    return (maker.__module__ or "").split(".")[0] in LIBRARIES


def _noted(value: object) -> tuple[object, object]:
    """Return a copy of a value, or itself where there is none, and what can be seen of it."""
    try:
        return copy.deepcopy(value), traces(value)
    except Exception:  # noqa: BLE001  what cannot be copied cannot be put back
        return value, traces(value)


def _restore(now: Any, before: Any, write: Callable[[Any], None]) -> None:
    """Make a variable what it was, in place where others may hold the same object."""
    if isinstance(now, list) and isinstance(before, list):
        now[:] = before
    elif isinstance(now, dict | set) and type(now) is type(before):
        now.clear()
        now.update(before)
    elif getattr(now, "__dict__", None) is not None and type(now) is type(before) and not isinstance(now, FunctionType):
        vars(now).clear()
        vars(now).update(vars(before))
    else:
        write(before)


DEEPEST = 8
"""How deep fields are looked into."""


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
    if isinstance(value, np.ndarray | bytearray | array.array):
        return type(value).__name__, bytes(value)
    if deepest == 0 or isinstance(value, nn.Module | PreTrainedTokenizerBase | ModuleType | type):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return [(traces(name, deepest - 1), traces(one, deepest - 1)) for name, one in items]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [traces(one, deepest - 1) for one in cast(Iterable[object], value)]
    parts = [traces(one, deepest - 1) for one in _parts(value)]
    return type(value).__qualname__, parts, b"" if any(one is not None for one in parts) else _pickled(value)


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


def _pickled(value: object) -> bytes:
    """Return what an object without fields would be stored as, such as an iterator's place; nothing if it cannot be."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  whatever its class says to that
        return b""


def _contents(cell: CellType) -> object:
    """Return what a closure's variable holds; nothing if it was not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


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
