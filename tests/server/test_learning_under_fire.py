"""A real server whose draft learns: it is killed at any moment of a swap, and a client sends it noise."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import running

from polydraft.models import load_pair
from polydraft.models.checkpoints.weight_versions import HALF, VersionFolder

KILLS, LIVES = 50, 3
"""How often somebody is killed, and how often the learner before the server."""
PROMPTS = [f"def f{number}(a, b):\n    return" for number in range(64)]
GREEDY = {"prompt": PROMPTS[:4], "temperature": 0.0, "max_tokens": 24, "learn": False}
HURRY = [sys.executable, "-c", "import hasty_server; hasty_server.main()", "serve", "--threads", "1"]


@contextmanager
def hasty(folder: Path, **changes: str) -> Iterator[tuple[psutil.Process, httpx.Client]]:
    """Run a server in a session of its own, and a client of it."""
    here = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}", **changes}
    options = ("--learn", str(folder), "--kept-texts", "0")
    with running(*options, command=HURRY, env=environment, start_new_session=True) as (process, address):
        with httpx.Client(base_url=address, timeout=300) as client:
            yield psutil.Process(process.pid), client


def until(true: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)
    return found


def answer(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    given = client.post("/v1/completions", json=fields)
    given.raise_for_status()
    return given.json()


def teach(client: httpx.Client, seed: int) -> None:
    """Let all prompts be answered, so that there is something to learn from."""
    answer(client, prompt=PROMPTS, temperature=1.0, seed=seed, max_tokens=24)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def learner_of(server: psutil.Process, told: list[int]) -> psutil.Process | None:
    """Return the learner's process: the one that holds the lock of who writes."""
    for one in server.children(recursive=True):
        try:
            if any(file.path.endswith("writer.lock") for file in one.open_files()):
                return one if one.pid not in told else None
        except psutil.Error:
            continue
    return None


@pytest.mark.soak
def test_a_server_or_its_learner_that_is_killed_around_a_swap_leaves_the_last_whole_version(tmp_path: Path) -> None:
    """Every text says which version drafted it, and greedy ones stay what they are."""
    chance, folder, kills, halves, before = random.Random(1), VersionFolder(tmp_path), 0, 0, 0
    text: list[str] = []

    def check(client: httpx.Client) -> None:
        own = answer(client, **GREEDY)
        found = [one["text"] for one in own["choices"]]
        assert found == (text or found), "greedy text is the target's"
        text[:] = found

    def kill(pid: int, *, whole: bool) -> None:
        nonlocal kills, halves, before
        if kills % 2:  # behind a swap that came to its end, else in the middle of the first
            until(lambda: folder.in_use().look > before)
        left = {*tmp_path.rglob(f"{HALF}*")}  # by whom was killed before
        until(lambda: {*tmp_path.rglob(f"{HALF}*")} - left)
        time.sleep(0.3 * chance.random())
        (os.killpg if whole else os.kill)(pid, signal.SIGKILL)
        until(lambda: is_gone(pid))
        kills, halves = kills + 1, halves + bool({*tmp_path.rglob(f"{HALF}*")} - left)
        own = folder.in_use()
        assert own.look >= before, "what was used once is not lost"
        before = own.look
        for one in folder.versions():
            folder.read(one)  # raises where it is not whole

    while kills < KILLS:
        with hasty(tmp_path, HASTY="all") as (server, client):
            own = folder.in_use()
            told = answer(client, **GREEDY)["polydraft"]["version"]
            assert told.endswith(f".{own.look}") and (not own.version or told == f"{own.version}.{own.look}")
            gone, lives = list[int](), min(LIVES, KILLS - kills - 1)
            for number in range(lives + 1):
                one = until(partial(learner_of, server, gone))
                teach(client, kills)
                check(client)
                if number == lives:
                    kill(server.pid, whole=True)
                    break
                kill(one.pid, whole=False)
                gone.append(one.pid)
                check(client)
    assert before > KILLS // 4 and halves > KILLS // 10, "kills come in the middle of a change"


@pytest.mark.soak
@pytest.mark.parametrize("guarded", [True, False])
def test_a_client_of_500_noises_changes_no_text_and_slows_nobody_but_where_no_look_guards(
    tmp_path: Path, guarded: bool
) -> None:
    """Where all new weights pass, whatever held-out texts say of them, the same noise costs more than 3 %."""
    chance, tokenizer = random.Random(2), load_pair().tokenizer
    words = [word for word in tokenizer.get_vocab() if word.isascii()]
    noises = [" ".join(chance.choices(words, k=12)) for _ in range(500)]
    folder, asked = VersionFolder(tmp_path), {**GREEDY, "prompt": PROMPTS[:32], "max_tokens": 48}
    with hasty(tmp_path, **({} if guarded else {"HASTY": "all"})) as (_, client):

        def told() -> tuple[list[str], float]:
            """Return greedy texts, and how many of their tokens came from a call."""
            own = answer(client, **asked)
            return [one["text"] for one in own["choices"]], own["metrics"]["speculative_decoding"]["tokens_per_call"]

        before = told()
        for seed in range(4 if guarded else 0):
            teach(client, seed)
        first = folder.in_use().look
        for start in range(0, 500, 20):
            answer(client, prompt=noises[start : start + 20], temperature=1.0, seed=start, max_tokens=24)
        until(lambda: folder.in_use().look > first)
        during = told()
        for seed in range(4, 12 if guarded else 4):
            teach(client, seed)
        looks = folder.in_use().look
        until(lambda: folder.in_use().look > looks + 1)
        behind = told()
    assert before[0] == during[0] == behind[0]
    assert (behind[1] >= 0.97 * before[1]) == guarded, (before[1], during[1], behind[1])
    assert guarded or folder.in_use().version, "weights that learnt from noise are in use"
