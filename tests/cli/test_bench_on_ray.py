"""`bench --ray` and `limits --ray` on a Ray cluster of this machine: as one process but for times, by two actors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray installs Ray")

import ray

from polydraft.cli.benchmark.bench import run_bench
from polydraft.errors import ClusterError
from polydraft.options.commands.bench_options import BenchOptions
from polydraft_lab.commands.options import LimitsOptions
from polydraft_lab.commands.run_limits import run_limits

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Run a cluster of this machine alone, of two CPUs."""
    ray.init("local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def named(folders: tuple[Path, Path], tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(f'{{"id": "{number}", "text": "def f{number}"}}\n' for number in range(6)))
    models = {"target": str(folders[0]), "draft": str(folders[1]), "dtype": "float64"}
    return {**models, "prompts": (str(prompts),), "as_json": True}


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_bench_by_two_actors(named: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**named, "max_new_tokens": 12, "temperatures": (0.0, 0.8), "arms": ("tree=2,1",)}
    assert run_bench(BenchOptions(**options)) == 0
    _, *alone = lines(capsys)
    assert run_bench(BenchOptions(**options, ray=True, replicas="2", out=tmp_path / "runs.jsonl")) == 0
    head, *found = lines(capsys)
    assert head["interrupted"] is False and head["machine"]["threads"] == 1
    one, two = ([row for row in rows if row["kind"] == "run"] for rows in (alone, found))
    same = ("arm", "prompts", "temperature", "turn", "tokens", "same_text", "setup")
    assert len(one) == 6 * 2 * 2 and [[run[name] for name in same] for run in one] == [
        [run[name] for name in same] for run in two
    ]
    rates = [[row["block_efficiency"] for row in rows if row["kind"] == "result"] for rows in (alone, found)]
    assert rates[0] == rates[1] and len(rates[0]) == 4 and rates[0][3]["mean"] > 1
    assert 1 <= len({run["place"]["actor"] for run in two}) <= 2, "the first that is ready may have done all"
    by_round: dict[str, set[str]] = {}
    for run in two:
        by_round.setdefault(f"{run['prompts']} {run['temperature']}", set()).add(run["place"]["actor"])
    assert all(len(actors) == 1 for actors in by_round.values()), "what is compared is of one actor"
    path = tmp_path / "runs.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:9]) + whole[9][:20])  # as a crash would leave it
    assert run_bench(BenchOptions(**options, ray=True, out=path)) == 0
    again = [row for row in lines(capsys) if row["kind"] == "run"]
    assert [[run[name] for name in same] for run in again] == [[run[name] for name in same] for run in one]
    assert sum(line in path.read_text() for line in whole[:9]) == 9


def test_limits_by_two_actors(named: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    options = {**named, "max_tokens": 8, "numbers": "1-2", "shortlist": 8, "temperatures": (0.7,)}
    assert run_limits(LimitsOptions(**options)) == 0
    head, *alone = lines(capsys)
    assert run_limits(LimitsOptions(**options, ray=True, replicas="2")) == 0
    there, *found = lines(capsys)
    assert "of a Ray cluster measured" in there.pop("actors")
    assert there == head and found == alone


def test_what_no_node_has_is_said_at_once(named: dict[str, Any]) -> None:
    with pytest.raises(ClusterError, match="No node of the Ray cluster has the 64 CPUs"):
        run_bench(BenchOptions(**named, ray=True, threads=64))
