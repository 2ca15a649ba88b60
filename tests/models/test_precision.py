"""A precision that the context chooses and not the model: the text is that of plain decoding in the same context."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from doubles import tiny_model
from packaging.version import Version

import polydraft
from polydraft.errors import InvalidParameter
from polydraft.models import CompiledModel, HuggingFaceModel, TreeCache, draft_model
from polydraft.models.anatomy import PackedLinear
from polydraft.models.tiny import tiny_draft, tiny_of_type

VOCAB, NEW = 48, 8
HALVES = [torch.bfloat16, torch.float16]
TEXT: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@cache
def plain(seed: int = 2) -> Any:
    torch.manual_seed(seed)
    return tiny_model("llama", VOCAB).float().eval()


def prompts(rows: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randint(1, size, (rows, 8), generator=torch.Generator().manual_seed(4))


def drafter(name: str) -> Any:
    made = {
        "itself": plain,
        "near": lambda: tiny_draft(plain(), 0.05),
        "half": lambda: tiny_draft(plain(), 0).bfloat16(),
    }
    return made[name]() if name in made else None if name == "default" else name


@pytest.mark.long(8)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["none", "default", "ngram", "self:int8", "self:skip=1", "itself", "near", "half"])
def test_texts_under_autocast_are_those_of_plain_decoding(half: torch.dtype, rows: int, name: str) -> None:
    with torch.autocast("cpu", dtype=half):
        expected = plain().generate(prompts(rows), **TEXT)
        found = polydraft.generate(plain(), prompts(rows), drafter=drafter(name), **TEXT)
    assert torch.equal(found.sequences, expected)


def test_streams_and_many_prompts_under_autocast() -> None:
    ids = prompts(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain().generate(ids, **TEXT)
        run = polydraft.stream(plain(), ids, **TEXT)
        list(run)
        many = polydraft.generate_many(plain(), ids.tolist(), batch_size=2, **TEXT)
        found = {one.name: one.tokens for one in many}
        first = polydraft.generate(plain(), ids[:1], keep_past=True, **{**TEXT, "max_new_tokens": 3})
        more = polydraft.generate(plain(), first.sequences, past=first.past, **{**TEXT, "max_new_tokens": NEW - 3})
    assert torch.equal(run.sequences(ids, 0), expected) and torch.equal(more.sequences, expected[:1])
    assert found == dict(enumerate(expected[:, 8:].tolist()))


@pytest.mark.long(3)
@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma3_text", "deepseek_v2", "mamba2", "bloom", "minimax"])
def test_other_types_under_autocast(kind: str) -> None:
    """Keys, values and states of other precisions than the model's, and of several at once."""
    model = tiny_of_type(kind).float().eval()
    ids = prompts(2, 60)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model.generate(ids, **TEXT)  # type: ignore[operator]
        for one in ("none", tiny_draft(model, 0.02)):
            assert torch.equal(polydraft.generate(model, ids, drafter=one, **TEXT).sequences, expected)


@pytest.mark.slow
def test_compiled_passes_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in another precision before."""
    engine, model, ids = import_module("polydraft.engine.generate"), plain(), prompts(2)
    monkeypatch.setattr(engine, "target_model", lambda model, compile: CompiledModel(model, (), "eager"))
    for context in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            expected = model.generate(ids, **TEXT)
            assert torch.equal(polydraft.generate(model, ids, drafter="none", **TEXT).sequences, expected)


@torch.no_grad()
def test_joined_and_packed_weights_follow_autocast() -> None:
    """A pass over several tokens has the precision that one over a single token has."""
    door = draft_model(plain())
    packed = PackedLinear(torch.nn.Linear(600, 600))
    given = torch.randn(5, 600)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed(given).dtype == packed(given[:1]).dtype == torch.bfloat16
        assert _logits(door).dtype == torch.bfloat16
    assert packed(given).dtype == torch.float32 and _logits(door).dtype == torch.float32


def _logits(door: HuggingFaceModel) -> torch.Tensor:
    places, start = torch.arange(4)[None], torch.zeros(1, dtype=torch.int64)
    mask = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    return door.forward(places + 1, places, mask, door.new_cache(1, 4), start).logits


@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_loses_nothing_of_a_wider_precision(batch: int) -> None:
    """Keys of bfloat16 first, then of float32: both come back as they were, in the precision that they had."""
    cache = TreeCache(2, batch, 6)
    view = cache.select([batch - 1]) if batch > 1 else cache
    rows = torch.randn(2, 1, 2, 3, 4)
    narrow, wide = rows.bfloat16(), rows
    view.place(torch.tensor([0]), 3, 3)
    for _ in range(2):
        keys, values = view.update(narrow[0], wide[0], 0)
        assert keys.dtype == torch.bfloat16 and values.dtype == torch.float32
        assert torch.equal(keys, narrow[0]) and torch.equal(values, wide[0])
    keys, values = view.update(wide[1], narrow[1], 1)
    assert torch.equal(keys, wide[1]) and torch.equal(values, narrow[1])
    assert torch.equal(view.update(narrow[0], wide[0], 0)[1], wide[0])


@contextmanager
def usually(set: Callable[[Any], object], now: Any, then: Any) -> Iterator[None]:
    set(now)
    try:
        yield
    finally:
        set(then)


NO_DEVICE = None if Version(torch.__version__) >= Version("2.13") else "cpu"
"""What takes a default device back: torch 2.6 fails in every later question for it where it was set to None."""
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "double": partial(usually, torch.set_default_dtype, torch.float64, torch.float32),
    "half": partial(usually, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "deterministic": partial(usually, torch.use_deterministic_algorithms, True, False),
    "the CPU": partial(usually, torch.set_default_device, "cpu", NO_DEVICE),
    "nothing": nullcontext,
}


@pytest.mark.long(3)
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_torch_is_told_in_general_changes_no_text(name: str) -> None:
    model, ids = plain(), prompts(2)
    expected = model.generate(ids, **TEXT)
    sampled = [
        polydraft.generate(model, ids, seed=3, drafter=one, max_new_tokens=NEW).sequences for one in ("none", model)
    ]
    with CONTEXTS[name]():
        for one in ("none", None, model, "self:int8"):
            assert torch.equal(polydraft.generate(model, ids, drafter=one, **TEXT).sequences, expected)
        for one, text in zip(("none", model), sampled, strict=True):
            found = polydraft.generate(model, ids, seed=3, drafter=one, max_new_tokens=NEW).sequences
            assert torch.equal(found, text)


@pytest.mark.parametrize("within", [torch.device, partial(usually, torch.set_default_device, then=NO_DEVICE)])
def test_another_default_device_is_refused(within: Any) -> None:
    said = "torch's default device is meta, .* leave torch.set_default_device out and put the models on their device"
    with within("meta"):
        for call in (polydraft.generate, polydraft.stream, polydraft.generate_many):
            with pytest.raises(InvalidParameter, match=said):
                call(plain(), prompts(1) if call is not polydraft.generate_many else [[1, 2]], max_new_tokens=2)
