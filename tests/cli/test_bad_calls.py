"""Bad calls end in one sentence: generated from the options' types, some in processes of their own."""

import io
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from bad_calls import Call, Good, commands, generated_call, make_world

import polydraft
from polydraft.cli import main
from polydraft.cli.benchmark import bench, demo, tune
from polydraft.cli.generation import one_text as generating
from polydraft.cli.generation import row_texts as batch
from polydraft.conformance import proved_rules
from polydraft.errors import FetchError
from polydraft.planning import load_plan
from polydraft.verifiers import BlockVerification, NaiveMatch, TypicalAcceptance

Folders = tuple[Path, Path]
CODES = (0, 1, 2, 130)
"""What a call may end with here: done, a bad finding, a bad call, interrupted."""
SECONDS = 30
QUICK, MANY, SEED = 15, 600, 1
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
FOUND = Path(__file__).with_name("found.jsonl")


class Hang(BaseException):
    """A call takes too long."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    code: int
    out: str
    err: str


class Terminal(io.TextIOWrapper):
    """A stream that may be a terminal, without colours."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(arguments: Call, *, terminal: bool = False) -> Outcome:
    """Call the command line in this process, in the current folder."""
    streams = [Terminal(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(3)]
    streams[1].terminal = streams[2].terminal = terminal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["polydraft", *arguments])
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        code = 0
        try:
            with time_limit(SECONDS):
                main()
        except SystemExit as end:
            code = int(end.code or 0)
        except Hang:
            code = -1
        except Exception as error:  # noqa: BLE001  none may come out of `main`
            code, _ = -2, streams[2].write(f"Traceback: {error!r}")
    texts = [stream.buffer.getvalue().decode() for stream in streams]  # type: ignore[attr-defined]
    return Outcome(code, *texts[1:])


def complaints(arguments: Call, one: Outcome, *, terminal: bool) -> list[str]:
    """Say what is wrong with how a call ended."""
    found = [] if one.code in CODES else [f"exit code {one.code}"]
    for words in ("Traceback", "unexpected error", "Exception ignored", "Warning:"):
        found += [words] if words in one.err + one.out else []
    said = [line for line in one.err.splitlines() if line.startswith("polydraft: ")]
    if one.code == 2 and not (len(said) == 1 and said[0].endswith(".")) and len(arguments) > 1:
        found.append("not one sentence")
    text = arguments[0] in ("generate", "chat") and not terminal  # into a pipe the text goes as it is
    if STEERING.search(one.err if text else one.err + one.out):
        found.append("control characters")
    return found


@pytest.fixture(scope="session")
def good(folders: Folders, small_chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Good:
    """Files as the commands write them, of the same calls that are then made with damaged ones."""
    place = tmp_path_factory.mktemp("good")
    (place / "target").symlink_to(folders[0])
    (place / "draft").symlink_to(folders[1])
    (place / "prompts.jsonl").write_text('{"id": "a", "prompt": "def add"}\n{"id": "b", "prompt": "class Point"}\n')
    models = ("--target", "target", "--draft", "draft")
    measured = (*models, "--prompts", "prompts.jsonl", "--limit", "1")
    calls: tuple[Call, ...] = (
        ("tune", *measured, "--max-tokens", "3", "--max-nodes", "4", "--max-depth", "2"),
        (
            *("bench", *measured, "--max-new-tokens", "3", "--temperature", "0"),
            *("--arm", "default", "--out", "runs.jsonl"),
        ),
        ("generate", "--max-new-tokens", "3", "--input", "prompts.jsonl", "--output", "texts.jsonl", *models),
        (
            *("limits", "--max-tokens", "3", "--k", "1-2", "--tree-every", "0", "--shortlist", "8", *measured),
            *("--temperature", "0.7", "--out", "limits"),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for arguments in calls:
            assert run(arguments).code == 0
    names = ("plan.json", "runs.jsonl", "texts.jsonl", "limits/limits.jsonl")
    return Good(*folders, small_chat_folder, *((place / name).read_bytes() for name in names))


@pytest.fixture
def short(good: Good, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let good calls end soon: tiny models in place of the embedded pair, and no long work."""
    loaded = lru_cache(maxsize=64)(lambda target, draft, dtype, device: polydraft.load(target, draft, dtype=dtype))

    def load(target: str, draft: str | None = None, *, dtype: str = "auto", device: str = "auto") -> Any:
        usual = device in ("auto", "cpu") and {target, draft} <= {
            str(good.target),
            str(good.draft),
            str(good.chat),
            None,
        }
        return (
            loaded(target, draft, dtype, device) if usual else polydraft.load(target, draft, dtype=dtype, device=device)
        )

    def load_pair(*, dtype: str = "auto", device: str = "auto", weights: str | None = None) -> Any:
        return load(str(good.target), str(good.draft), dtype=dtype, device=device)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for room in (generating, demo):
        monkeypatch.setattr(room, "load_pair", load_pair)
    path = tmp_path / "plan"
    path.write_bytes(good.plan)
    plan = load_plan(path)
    monkeypatch.setattr(tune, "tune", lambda *_, **__: plan)
    monkeypatch.setattr(demo, "demo_prompts", lambda: ["def add(", "class Point:"])
    compare = demo.compare
    monkeypatch.setattr(demo, "compare", lambda *given, **options: compare(*given, **{**options, "repeats": 1}))
    monkeypatch.setattr(proved_rules, "node_rules", lambda: (NaiveMatch(), TypicalAcceptance()))
    monkeypatch.setattr(proved_rules, "tree_rules", lambda: (BlockVerification(),))
    monkeypatch.setattr(generating, "compiling", interrupted)
    monkeypatch.setattr(batch, "compiling", interrupted)
    monkeypatch.setattr("polydraft.cli.benchmark.tune_skips.tune_skips", interrupted)
    monkeypatch.setattr("polydraft.cli.train.train_pair", interrupted)
    monkeypatch.setattr("polydraft.training.heads.head_making.write_shards", interrupted)
    monkeypatch.setattr("polydraft.cli.train.load_pair", load_pair)
    monkeypatch.setattr("polydraft.bench.speed.schedule.SpeedSettings.repeats", 1)
    monkeypatch.setattr("polydraft.cli.models.registered_types", lambda: ("llama",))
    limit_rounds(monkeypatch)
    limit_results(monkeypatch)
    limit_serving(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    for way in ("by_pip", "by_address"):
        monkeypatch.setattr(f"polydraft.fetching.attempt.{way}", offline)


def offline(*_: object) -> None:
    raise FetchError("There is no connection.")


def limit_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come after a few rounds of a benchmark, however many were asked for."""
    original, schedule = bench.keep_all, bench.rounds

    def some(new: Iterator[Any]) -> Iterator[Any]:
        for number, one in enumerate(new):
            if number == 2:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(bench, "keep_all", lambda new, *others: original(some(new), *others))
    monkeypatch.setattr(bench, "rounds", lambda prompts, plan: schedule(prompts, replace(plan, repeats=1)))


def limit_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come after a few passes and after a few texts of a planner, however many were asked for."""
    for name in ("passes.time_pass", "planner.side_by_side"):
        module, function = (f"polydraft_lab.subjects.{name}").rsplit(".", 1)
        monkeypatch.setattr(f"{module}.{function}", few(getattr(sys.modules[module], function)))


def limit_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server end as soon as it would listen, without a model: its worker is another process."""
    for verb in ("launch", "wait"):
        monkeypatch.setattr(f"polydraft.server.front.desk.Desk.{verb}", lambda *_: None)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)


def few(function: Callable[..., Any], most: int = 20) -> Callable[..., Any]:
    """Return a function that may be called so often in one folder, which every call has of its own."""
    calls = Counter[str]()

    def called(*arguments: Any) -> Any:
        calls[os.getcwd()] += 1
        if calls[os.getcwd()] > most:
            raise KeyboardInterrupt
        return function(*arguments)

    return called


Try = Callable[[int, int, Call], list[str]]


@pytest.fixture
def tried(good: Good, short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Make one call in a world of its own and return what is wrong with how it ends."""

    def make(seed: int, number: int, arguments: Call) -> list[str]:
        place, terminal = tmp_path / f"{seed}-{number}", bool(number % 2)
        place.mkdir(exist_ok=True)
        make_world(place, good, seed, number)
        monkeypatch.chdir(place)
        one = run(arguments, terminal=terminal)
        wrong = complaints(arguments, one, terminal=terminal)
        return [f"{seed} {number} {json.dumps(arguments)}: {', '.join(wrong)}: {one.err[-600:]!r}"] if wrong else []

    return make


def test_every_parameter_is_covered() -> None:
    """The walk over the application finds what help shows."""
    found = commands()
    assert {("generate",), ("bench",), ("bench", "rules"), ("train", "pair")} <= {*found}
    assert {"--target", "--compile", "--input", "--quiet", ""} <= {one.flag for one in found[("generate",)]}
    assert sum(map(len, found.values())) >= 80


def test_calls_that_once_failed(tried: Try) -> None:
    assert not [line for row in map(json.loads, FOUND.read_text().splitlines()) for line in tried(*row[:2], (*row[2],))]


def test_some_generated_calls(tried: Try) -> None:
    assert not [line for number in range(QUICK) for line in tried(SEED, number, generated_call(SEED, number))]


@pytest.mark.slow
def test_many_generated_calls(tried: Try) -> None:
    seed = int(os.environ.get("BAD_CALLS_SEED", SEED + 1))
    found = [line for number in range(MANY) for line in tried(seed, number, generated_call(seed, number))]
    assert not found, "\n".join(found)
