"""How much of the house one call enters: files, functions, and our frames from a draft to the first product."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import polydraft

PACKAGE = str(Path(polydraft.__file__).parent)
CALLS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0, "seed": 0},  # a route draws whom it asks
    "temperature 1": {"temperature": 1.0, "top_k": 0, "seed": 0},
    "no drafts": {"temperature": 0.0, "drafter": "none"},
}
MOST = {"temperature 0": (47, 35, 623), "temperature 1": (41, 27, 498), "no drafts": (37, 23, 426)}
"""The most files of a call, files of the steps after the first, and functions of the call: the fused pass is a file of
them, measured costs another."""
FRAMES = {"temperature 0": 9, "temperature 1": 8}
PRODUCTS = ("linear", "_linear_pointwise")


class Trace:
    """What Python enters of the package while it is on, and how many of its frames lie below a draft at a product."""

    def __init__(self) -> None:
        self.files, self.functions, self.frames = set[str](), set[tuple[str, str, int]](), 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            self.files.add(name)
            self.functions.add((name, frame.f_code.co_qualname, frame.f_code.co_firstlineno))
        if (
            event == "c_call"
            and not self.frames
            and getattr(argument, "__name__", "") in ("linear", "_linear_pointwise")
        ):
            self.frames = below_draft(frame)


def below_draft(frame: FrameType | None) -> int:
    """Return how many frames of ours lie between the drafter's own `draft` and here, both counted; 0 outside."""
    count, found = 0, 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(PACKAGE)
        if frame.f_code.co_name == "draft" and "/drafters/" in frame.f_code.co_filename:
            found = count
        frame = frame.f_back
    return found


@cache
def traced(name: str) -> tuple[Trace, Trace]:
    """Return what a call enters, and what its steps after the first do."""
    pair, call, later = polydraft.load_pair(), Trace(), Trace()
    ids = torch.tensor([pair.tokenizer("def add(a, b):")["input_ids"]])
    options = {"drafter": pair.draft, **CALLS[name], "max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
    polydraft.stream(pair.target, ids, **options).exhaust()
    run = within(call, lambda: polydraft.stream(pair.target, ids, **options))
    within(call, lambda: next(run))
    within(later, run.exhaust)
    call.files |= later.files
    call.functions |= later.functions
    return call, later


def within(trace: Trace, work: Callable[[], Any]) -> Any:
    sys.setprofile(trace)
    try:
        return work()
    finally:
        sys.setprofile(None)


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", CALLS)
def test_a_call_enters_few_files_and_functions(name: str) -> None:
    call, later = traced(name)
    found = (len(call.files), len(later.files), len(call.functions))
    assert all(own <= most for own, most in zip(found, MOST[name], strict=True)), found


@pytest.mark.parametrize("name", FRAMES)
def test_few_frames_lie_between_a_draft_and_its_first_product(name: str) -> None:
    assert 0 < traced(name)[0].frames <= FRAMES[name]
