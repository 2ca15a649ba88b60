"""Targets over several processes: texts are those of one, and whatever ends a process is said in a sentence."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import COMMAND, TORCHRUN, children, ended, gone, pair_of, random_llama, run

import polydraft
from polydraft.conformance import check
from polydraft.errors import InvalidParameter, RankLost, UnsupportedModel
from polydraft.models import RANKS
from polydraft.models.distributed.ranks import rank_under_torchrun, uninterrupted

PROMPTS = ("def add(a, b):\n    return", "import os\n", "for x in range(10):\n    print(x)\n")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), 4, 2)


@pytest.mark.parametrize(
    ("parallel", "match"),
    [
        (3, 'has 4 heads and 2 of keys, which 3 ranks cannot share; take a number that divides both, or "mlp:3"'),
        (4, "has 4 heads and 2 of keys, which 4 ranks cannot share"),
        ("mlp:5", "inner layers of 128, which 5 ranks cannot share evenly"),
        (2, "inner layers of 127, which 2 ranks cannot share evenly"),
        ("two", "parallel must be a number of ranks from 2 to 1024, or mlp: and such a number, but is 'two'"),
    ],
)
def test_what_does_not_divide_is_refused_before_a_process_starts(
    parallel: Any, match: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    if "127" in match:
        config = json.loads((llama / "config.json").read_text()) | {"intermediate_size": 127}
        own = llama.parent / "uneven"
        own.mkdir()
        for one in llama.iterdir():
            (own / one.name).write_bytes(one.read_bytes())
        (own / "config.json").write_text(json.dumps(config))
        llama = own
    with pytest.raises((UnsupportedModel, InvalidParameter), match=match):
        polydraft.load(llama, parallel=parallel)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"weights": "int8"}, "weights='int8' rounds a whole target"),
        ({"device": "cpu"}, "each rank takes its own device, and device is 'cpu'"),
        ({"draft": "self:int8"}, "'self:int8' is made of a whole target"),
        ({"draft": "pair-head"}, "'pair-head' is a draft head, which reads the target's states"),
    ],
)
def test_what_needs_a_whole_target_is_refused_by_name(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidParameter, match=match):
        polydraft.load("pair", parallel="mlp:2", **given)


def test_another_number_of_processes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_under_torchrun(2) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_under_torchrun(3) == 1
    with pytest.raises(InvalidParameter, match="parallel asks for 2 ranks, but 3 processes were started"):
        polydraft.load("pair", parallel="mlp:2")


def test_ctrl_c_waits_for_what_is_told_and_comes_through_when_pressed_again() -> None:
    before, done = signal.signal(signal.SIGINT, signal.default_int_handler), list[str]()
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("not reached")
    assert done == ["whole"]
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


SHARED = {
    "pair": ("mlp:2", lambda folder: "pair"),
    "llama": ("2", lambda folder: random_llama(folder, 4, 2)),
    "smollm2": ("3", lambda folder: random_llama(folder, 9, 3, hidden_size=576, intermediate_size=1536)),
}


@pytest.mark.slow
def test_sampled_texts_follow_the_law(tmp_path: Path) -> None:
    """By `conformance.check`, with its false-alarm rate of 1e-6: 2,000 texts of two tokens from 8."""
    target, draft = (random_llama(tmp_path / one, 4, 2, vocab_size=8) for one in ("target", "draft"))
    alone, drafts = (polydraft.load(one, dtype="float64") for one in (target, draft))
    shared = polydraft.load(target, dtype="float64", parallel=2)

    def texts(prompts: Any, seeds: Any) -> Any:
        ids = torch.tensor(prompts)
        options = {"policy": "2,1", "temperature": 1.0, "top_k": 0, "eos_token_id": None, "max_new_tokens": 2}
        made = polydraft.generate(shared.target, ids, drafter=drafts.target, seed=seeds[0], **options)
        return made.sequences[:, ids.shape[1] :].tolist()

    report = check(texts, alone.target, [[1, 2, 3]], new_tokens=2, batch_size=50, most_samples=2000)
    ended(shared.target)
    assert report.passed and report.samples == 2000


@pytest.mark.slow
def test_a_server_writes_the_texts_of_one_process(llama: Path) -> None:
    pytest.importorskip("fastapi", reason="the server needs the extra serve")
    from serving import ask, client

    told = [{"prompt": PROMPTS[one % 3], "seed": one, "temperature": 0.3 * one, "max_tokens": 16} for one in range(8)]
    found = list[list[str]]()
    for parallel in ("2", None):
        settings = {"target": str(llama), "draft": "pair-draft", "dtype": "float64", "parallel": parallel}
        with client(**settings, tree="2,1,1") as app, ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda fields, app=app: ask(app, ignore_eos=True, **fields), told)
            found.append([one["choices"][0]["text"] for one in answers])
    assert found[0] == found[1] and len({*found[0]}) == 8


SOON = 60
"""Seconds in which all processes have ended; on a machine that is not busy 15 are enough."""
LONG = ("generate", "--parallel", "2", "--draft", "pair-draft", "--dtype", "float64", "--max-new-tokens", "100000")


@contextmanager
def started(place: Path, *command: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a command, wait until it writes text, and return its process and those that hold parts."""
    own = {**os.environ, "TMPDIR": str(place), "PYTHONUNBUFFERED": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": own}
    with subprocess.Popen([*COMMAND, *command], **streams) as process:
        assert process.stdout is not None
        process.stdout.read(len(PROMPTS[0]) + 10)
        try:
            yield process, children(process.pid)
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a follower is killed", "Ctrl-C", "rank 0 is killed"])
def test_whatever_ends_a_process_is_said_and_none_is_left(what: str, tmp_path: Path) -> None:
    folder, place = random_llama(tmp_path / "model", 4, 2, max_position_embeddings=4096), tmp_path / "place"
    place.mkdir()
    with started(place, *LONG, "--target", str(folder), "--temperature", "1", PROMPTS[0]) as (process, others):
        (other,), began = others, time.monotonic()
        if what == "a follower is killed":
            os.kill(other, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT if what == "Ctrl-C" else signal.SIGKILL)
        _, said = process.communicate(timeout=SOON)
        while not gone(other):
            assert time.monotonic() - began < SOON
            time.sleep(0.05)
        code = process.returncode
    lines = [line for line in said.splitlines() if "Loading" not in line]
    if what == "a follower is killed":
        assert (
            code == 2 and lines[-1] == "polydraft: The process of rank 1 of 2 ended by signal 9; load the target anew."
        )
    elif what == "Ctrl-C":
        assert code == 130 and lines[-1].startswith("polydraft: Interrupted")
    assert "Traceback" not in said and not [*place.glob("polydraft-ranks-*")]


@pytest.mark.slow
def test_a_refused_prompt_leaves_no_process(tmp_path: Path) -> None:
    folder, place = random_llama(tmp_path / "model", 4, 2, max_position_embeddings=8), tmp_path / "place"
    place.mkdir()
    found = run(*COMMAND, "generate", "--parallel", "2", "--target", str(folder), PROMPTS[2], TMPDIR=str(place))
    assert found.returncode == 2 and found.stderr.count("\n") == 1, found.stderr
    assert "The prompt has 13 tokens, but at most 8 fit" in found.stderr
    assert not [*place.glob("polydraft-ranks-*")]


@pytest.mark.slow
def test_a_lost_rank_ends_the_target(llama: Path) -> None:
    pair = pair_of(llama, "2")
    ranks = vars(pair.target)[RANKS]
    ids = pair.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    run_of = polydraft.stream(pair.target, ids, drafter=pair.draft, max_new_tokens=64)
    next(run_of)
    ranks._helpers[0].process.kill()
    with pytest.raises(RankLost, match="rank 1 of 2 ended by signal 9; load the target anew"):
        run_of.exhaust()
    with pytest.raises(RankLost, match="load the target anew"):
        polydraft.generate(pair.target, ids, max_new_tokens=4)
    again = pair_of(llama, "2")  # which is possible in the same process
    text = polydraft.generate(again.target, ids, drafter=again.draft, max_new_tokens=16).sequences
    assert text.equal(polydraft.generate(pair_of(llama).target, ids, max_new_tokens=16).sequences)
    ended(again.target)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_under_torchrun_rank_0_writes_and_another_world_size_is_said(count: int, llama: Path) -> None:
    call = ["generate", "--parallel", "2", "--target", str(llama), "--draft", "pair-draft", "--dtype", "float64"]
    ours = "--no-python", *COMMAND
    found = run(*TORCHRUN, str(count), *ours, *call, "--json", "--max-new-tokens", "12", PROMPTS[0])
    if count == 2:
        assert found.returncode == 0, found.stderr
        told = json.loads(found.stdout)
        pair = pair_of(llama)
        ids = pair.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        assert (
            told["tokens"]
            == polydraft.generate(pair.target, ids, max_new_tokens=12).sequences[0, ids.shape[1] :].tolist()
        )
        return
    assert found.returncode != 0 and "exitcode  : 2" in found.stderr
    assert "polydraft: parallel asks for 2 ranks, but 3 processes were started" in found.stderr


IN_STEP = """
import os, sys, torch, polydraft
from polydraft.errors import InvalidParameter
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
given = {"dtype": torch.float64, "distributed_config": DistributedConfig(tp_size=2)}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **given).eval()
ids = torch.tensor([[1, 2, 3]])
for options in ({"policy": "auto"}, {"drafter": "suffix:/tmp/none"}, {"temperature": 1.0}):
    try:
        polydraft.generate(model, ids, max_new_tokens=4, **options)
    except InvalidParameter as error:
        os.write(1, f"REFUSED {error}\\n".encode())  # in one piece, since both ranks write there
texts = polydraft.generate(model, ids, max_new_tokens=8, temperature=1.0, seed=1).sequences.tolist()
os.write(1, f"TEXT {texts}\\n".encode())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_call_by_themselves_have_no_planner_and_no_store(llama: Path, tmp_path: Path) -> None:
    script = tmp_path / "in_step.py"
    script.write_text(IN_STEP)
    found = run(*TORCHRUN, "2", str(script), str(llama))
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    refused, texts = [[line for line in lines if line.startswith(word)] for word in ("REFUSED", "TEXT")]
    assert len(refused) == 6 and all("load it by polydraft.load(..., parallel=2)" in line for line in refused)
    assert len(texts) == 2 and len({*texts}) == 1


@pytest.mark.slow
def test_heads_that_do_not_divide_are_said_of_models_that_others_have_loaded(tmp_path: Path) -> None:
    folder = random_llama(tmp_path / "model", 4, 1)
    script = tmp_path / "in_step.py"
    script.write_text(IN_STEP.split("for options")[0] + "polydraft.generate(model, ids, max_new_tokens=2)\n")
    found = run(*TORCHRUN, "2", str(script), str(folder))
    assert "has 4 heads and 1 of keys, which 2 ranks cannot share; take a number that divides both" in found.stderr


# What shares a target with all tests stands last: a process has one such target at a time.
@pytest.fixture(scope="module", params=SHARED)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Return a pair over several processes, and the same in one."""
    parallel, make = SHARED[request.param]
    target = make(tmp_path_factory.mktemp("shared"))
    shared = pair_of(target, parallel)
    yield shared, pair_of(target)
    ended(shared.target)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": "none"},
    "plain sampled": {"drafter": "none", "temperature": 1.0, "top_k": 0, "seed": 4},
    "greedy": {"policy": 4},
    "sampled chain": {"policy": 3, "temperature": 1.0, "top_k": 0, "seed": 1},
    "sampled tree": {"policy": "2,2,1", "temperature": 0.8, "seed": 2},
    "planner": {"policy": "auto"},
    "n-grams": {"drafter": "ngram", "temperature": 0.9, "seed": 6},
    "several": {"drafter": "merge"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALLS, "grammar", "suffix store", "batch"])
def test_texts_are_those_of_one_process(name: str, both: tuple[Any, Any], tmp_path: Path) -> None:
    rows = 3 if name == "batch" else 1
    found = list[Any]()
    for place, pair in enumerate(both):
        pair.tokenizer.pad_token = pair.tokenizer.eos_token
        prompts = pair.tokenizer(list(PROMPTS[:rows]), padding=True, padding_side="left", return_tensors="pt")
        options: dict[str, Any] = CALLS.get(name, {"policy": "2,1,1", "temperature": 0.7, "seed": 7})
        if name == "grammar":
            options = {"grammar": polydraft.Grammar.json_schema(SCHEMA), "tokenizer": pair.tokenizer, "policy": 2}
        if name == "suffix store":
            options = {"drafter": f"suffix:{tmp_path / str(place)}", "temperature": 0.8, "seed": 3}
        options = {"drafter": pair.draft, "max_new_tokens": 24, **options}
        for _ in range(2 if name == "suffix store" else 1):  # the second text reads what the first one left
            found.append(polydraft.generate(pair.target, **prompts, **options).sequences.tolist())
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.slow
def test_a_shared_target_is_run_by_polydraft_alone(both: tuple[Any, Any]) -> None:
    model = both[0].target
    with pytest.raises(UnsupportedModel, match=r"its passes are run by polydraft.generate and its like alone"):
        model(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(UnsupportedModel, match=r"reads the target's states or keys"):
        polydraft.generate(
            model, torch.tensor([[1, 2]]), drafter=polydraft.load("pair", "pair-head").draft, max_new_tokens=2
        )
    with pytest.raises(InvalidParameter, match=r"belongs to a torch\.distributed group already"):
        polydraft.load("pair", parallel="mlp:2")
