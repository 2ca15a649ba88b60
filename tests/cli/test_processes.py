"""The command as processes: Ctrl-C at any moment, streams that are closed, full or not read, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from polydraft.machine_code import COMPILING

START = "from polydraft_command import main; main()"
SERVER = """
import gc, json, os, sys
import polydraft.cli.benchmark.bench, polydraft.cli.conformance, polydraft.cli.benchmark.demo
import polydraft.cli.generation, polydraft.cli.train, polydraft.cli.benchmark.tune, polydraft_command
import polydraft_lab.commands.run_limits, polydraft_lab.commands.run_passes, polydraft_lab.commands.run_planner
import polydraft_lab.commands.run_rules
gc.freeze()
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(call["place"])
        for number, where in enumerate(call["streams"]):
            if where is None:
                os.close(number)
            elif where != "keep":
                opened = os.open(where, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
                os.dup2(opened, number)
                os.close(opened)
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            there = call["streams"][number] is not None
            setattr(sys, name, open(number, mode, closefd=False, encoding="utf-8") if there else None)
        sys.argv = ["polydraft", *map(os.fsdecode, (one.encode("latin-1") for one in call["arguments"]))]
        polydraft_command.main()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Imports the package once, and forks a process for every call; each ends as a process does, with its streams."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: bytes
    err: str


Call = Callable[..., Ended]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported the package."""
    keys = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **keys) as process:  # type: ignore[call-overload]
        yield process
        process.stdin.close()


@pytest.fixture
def call(server: subprocess.Popen[str], tmp_path: Path) -> Call:
    def run(*arguments: bytes | str, stdin: str | None = "/dev/null", stdout: str | None = "out") -> Ended:
        words = [one if isinstance(one, bytes) else one.encode() for one in arguments]
        (tmp_path / "out").unlink(missing_ok=True)
        (tmp_path / "err").unlink(missing_ok=True)
        row = {
            "place": str(tmp_path),
            "streams": [stdin, stdout, "err"],
            "arguments": [one.decode("latin-1") for one in words],
        }
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(row) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out = tmp_path / "out"
        return Ended(code, out.read_bytes() if out.exists() else b"", (tmp_path / "err").read_text(errors="replace"))

    return run


BAD: dict[str, tuple[Sequence[bytes | str], str]] = {
    "no such command": (["generete"], "No such command 'generete'"),
    "no such option": (["generate", "x", "--tre", "2"], "No such option: --tre"),
    "no number": (["generate", "x", "--temperature", "warm"], "Invalid value for '--temperature'"),
    "no value": (["generate", "x", "--tree"], "requires an argument"),
    "bytes in the prompt": (["generate", b"caf\xe9"], "The argument 'caf\\udce9' is not UTF-8"),
    "bytes in a path": (["report", b"\xff.jsonl"], "is not UTF-8"),
    "a seed of 23 digits": (["generate", "x", "--seed", "9" * 23], "--seed is at most 9223372036854775807, but 999"),
    "a negative seed": (["bench", "--seed", "-1"], "Invalid value for '--seed'"),
    "no such subject": (["bench", "pases"], "No such command 'pases'"),
    "a number of 10 digits": (
        ["bench", "passes", "--known", "9" * 10],
        "--known is at most 2147483647, but 9999999999",
    ),
    "no user of that name": (["limits", "--out", "~nosuchuser/x"], "there is no home folder ~nosuchuser"),
    "a long name": (["report", "a" * 300], "cannot be used: File name too long"),
    "a device": (["bench", "--out", "/dev/full"], "/dev/full is a device, not a regular file"),
    "a pipe to write": (["tune", "--out", "fifo"], "fifo is a pipe, not a regular file"),
    "a pipe to read": (["generate", "--input", "fifo", "--output", "x"], "fifo is a pipe, not a regular file"),
    "a pipe as plan": (["generate", "x", "--plan", "fifo"], "fifo is a pipe, not a regular file"),
    "a folder that is missing": (["demo", "--svg", "no/such/tree.svg"], "there is no folder no/such"),
    "a folder that is a file": (["train", "pair", "--out", "err", "--work", "w"], "err is a file, not a folder"),
    "below a file": (["train", "pair", "--out", "o", "--work", "err/w"], "err is no folder"),
    "no model folder": (["generate", "x", "--target", "~nosuchuser/m"], "There is no model folder '~nosuchuser/m'"),
    "torch's empty device": (["generate", "x", "--device", "meta"], "There is no device 'meta' to generate on"),
    "an empty stop string": (["generate", "x", "--stop", ""], '--stop "" stops nowhere'),
    "steering characters": (["generate", "x", "--dtype", "\x1b[31m\u202e"], "no dtype '\\x1b[31m\\u202e'"),
}


@pytest.mark.long(3)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_is_one_sentence_and_exit_code_2(case: str, call: Call, tmp_path: Path) -> None:
    arguments, sentence = BAD[case]
    os.mkfifo(tmp_path / "fifo")
    ended = call(*arguments)
    assert ended.code == 2 and ended.out == b""
    assert ended.err.startswith("polydraft: ") and ended.err.count("\n") == 1 and ended.err.endswith(".\n")
    assert sentence in ended.err and "\x1b" not in ended.err


def test_a_full_output_is_one_sentence(call: Call) -> None:
    for arguments in (["--help"], ["conformance", "--rule", "naive match", "--quick"], ["--version"]):
        ended = call(*arguments, stdout="/dev/full")
        assert (ended.code, ended.err) == (
            1,
            "polydraft: Standard output cannot be written: No space left on device.\n",
        )


def test_a_closed_output_is_one_sentence_before_any_work(call: Call) -> None:
    ended = call("generate", "x", stdout=None)
    assert (ended.code, ended.err) == (1, "polydraft: Standard output is closed: send it to a file, or to /dev/null.\n")


def test_a_closed_input_is_an_empty_prompt(call: Call) -> None:
    ended = call("generate", "-", stdin=None)
    assert ended.code == 2 and ended.err == "polydraft: The prompt is empty: give at least one character.\n"


def test_an_input_that_is_no_text_is_one_sentence(call: Call, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 et th\xe9")
    ended = call("generate", "-", stdin=str(tmp_path / "latin"))
    assert ended.code == 2 and "Standard input is not UTF-8" in ended.err and ended.err.count("\n") == 1


def test_an_output_that_nobody_reads_ends_it_quietly(call: Call) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = call("--help", stdout=f"/proc/{os.getpid()}/fd/{write}")
    finally:
        os.close(write)
    assert ended.code in (1, 141) and ended.err == ""


MOMENTS = {
    "first imports": ([], 0.3),
    "torch is imported": (["--version"], 1.2),
    "more imports": (["bench", "--arm", "hf"], 2.5),
    "a subject's imports": (["bench", "rules"], 3.0),
    "a command's imports or work": (["generate", "def f(", "--max-new-tokens", "900"], 6.0),
}


def test_ctrl_c_at_any_moment_is_exit_code_130_and_no_traceback(tmp_path: Path) -> None:
    """All processes at once, so that the test waits for one only."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    begun = [
        (time.monotonic() + seconds, subprocess.Popen([sys.executable, "-c", START, *words], cwd=tmp_path, **pipes))
        for words, seconds in MOMENTS.values()
    ]
    for moment, process in begun:
        time.sleep(max(0.0, moment - time.monotonic()))
        alive = process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert b"Traceback" not in err + out and b"Exception ignored" not in err
        assert not alive or (process.returncode, b"polydraft: Interrupted: " in err) == (130, True)


SAID = b"polydraft: Interrupted: nothing was kept.\n"
IN_A_FINALIZER = """
import signal, sys, time
from polydraft.cli.process import exit_code_of

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def command():
    Dropped()
    time.sleep(60)

sys.exit(exit_code_of(command))
"""


def test_ctrl_c_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    """Python prints and drops an exception that a `__del__` raises."""
    ended = subprocess.run([sys.executable, "-c", IN_A_FINALIZER], cwd=tmp_path, capture_output=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", SAID)


@dataclass(frozen=True)
class Began:
    """A process in a folder of its own, and that folder."""

    process: subprocess.Popen[bytes]
    place: Path


def grown(path: Path, lines: int) -> Callable[[Began], bool]:
    """Wait until a file has so many lines."""
    return lambda began: (began.place / path).exists() and (began.place / path).read_bytes().count(b"\n") >= lines


def in_machine_code(began: Began) -> bool:
    """Wait until the compiler is there: what follows calls machine code."""
    return b"llvmlite" in Path(f"/proc/{began.process.pid}/maps").read_bytes()


def printing(began: Began) -> bool:
    """Wait until something was printed."""
    return (began.place / "out").stat().st_size > 0


ROWS = "".join(json.dumps({"id": number, "prompt": "def f("}) + "\n" for number in range(40))
AT_WORK: dict[str, tuple[Sequence[str], Callable[[Began], bool], Sequence[str]]] = {
    "generate": (
        ["generate", "def f(", "--max-new-tokens", "900"],
        printing,
        ["Interrupted: the text that was written is printed."],
    ),
    "generate --input": (
        ["generate", "--input", "rows", "--output", "texts", "--max-new-tokens", "60", "--batch-size", "2"],
        grown(Path("texts"), 2),
        [
            "Stopping after this step; Ctrl-C again stops at once.",
            "Interrupted: the same command goes on from texts.",
        ],
    ),
    "bench": (
        ["bench", "--out", "runs"],
        grown(Path("runs"), 8),
        ["Interrupted: the finished rounds are in runs; the same command goes on from there."],
    ),
    "limits": (
        ["limits", "--out", "found", "--max-tokens", "8"],
        grown(Path("found/limits.jsonl"), 3),
        ["Interrupted: the finished texts are in found; the same command goes on from there."],
    ),
    "conformance": (["conformance"], in_machine_code, ["Interrupted: nothing was kept."]),
    "demo": (["demo"], printing, ["Interrupted: nothing was kept."]),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at what a process has loaded")
@pytest.mark.parametrize("name", AT_WORK)
def test_ctrl_c_at_work_says_what_was_kept_on_standard_error(name: str, tmp_path: Path) -> None:
    words, ready, said = AT_WORK[name]
    (tmp_path / "rows").write_text(ROWS)
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen([sys.executable, "-u", "-c", START, *words], cwd=tmp_path, **streams)
        late = time.monotonic() + 300
        while not ready(Began(process, tmp_path)):
            assert process.poll() is None and time.monotonic() < late, (tmp_path / "err").read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
    told = (tmp_path / "err").read_text().splitlines()
    assert [line for line in told if line and COMPILING not in line] == [f"polydraft: {sentence}" for sentence in said]
    assert "Interrupted" not in (tmp_path / "out").read_text()


@pytest.mark.slow
def test_machine_code_is_kept_for_other_processes_and_said_once(tmp_path: Path) -> None:
    words = ["generate", "import os\nimport os\n", "--drafter", "ngram", "--temperature", "1", "--max-new-tokens", "12"]
    for said in (f"polydraft: {COMPILING}\n", ""):
        ended = subprocess.run(
            [sys.executable, "-c", START, *words],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stderr == said
