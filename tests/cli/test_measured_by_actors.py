"""`bench --ray` and `limits --ray` without Ray: what is sent to actors, what is merged, and what is refused.

Actors are played by copies in this process that tell their results backwards; what is sent to them is pickled.
"""

import json
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polydraft.bench.environment import RayActor
from polydraft.bench.speed import read_speed_results
from polydraft.cli import main
from polydraft.cli.benchmark import measured_on_ray
from polydraft.cluster import ModelCopy
from polydraft.errors import ClusterError, InvalidParameter

Call = Callable[..., int]
BENCH = ["--max-new-tokens", "5", "--temperature", "0", "--temperature", "0.7", "--arm", "tree=2,1", "--json"]
LIMITS = ["--max-tokens", "5", "--k", "1-2", "--tree-every", "4", "--shortlist", "8", "--temperature", "0.7", "--json"]
TIMED = ("seconds", "memory", "load", "place")


class Actors:
    """Two actors in this process, whose results come in the opposite order; a third where one of them ends."""

    def __init__(self) -> None:
        self.sent, self.sizes, self.stop_after = list[Any](), list[dict[str, Any]](), 1000

    def made(self, make: Any, arguments: Any, items: Sequence[Any], **size: Any) -> Iterator[Any]:
        self.sizes.append(size)
        self.sent.append(pickle.loads(pickle.dumps((arguments, items))))
        arguments, items = self.sent[-1]
        copies = cycle([(name, ModelCopy(make, arguments)) for name in ("a" * 16, "b" * 16)[: size["copies"][0]]])
        for number, item in enumerate(reversed(items)):
            if number == self.stop_after:
                raise KeyboardInterrupt
            name, copy = next(copies)
            context = SimpleNamespace(get_actor_id=lambda name=name: name)
            sys.modules["ray"] = SimpleNamespace(get_runtime_context=lambda context=context: context)  # type: ignore
            found, failure = pickle.loads(copy({"item": [pickle.dumps(item)]})["made"][0])
            if failure:
                raise ClusterError(failure)
            yield found


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    played = Actors()

    @contextmanager
    def joined(_: str | None) -> Iterator[Any]:
        yield SimpleNamespace(cluster_resources=dict)

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(measured_on_ray, "joined", joined)
    monkeypatch.setattr(measured_on_ray, "check_nodes", lambda *_, **told: played.sizes.append(told))
    default = {"copies": (1, 1)}
    monkeypatch.setattr(
        measured_on_ray, "made_by_copies", lambda *given, **size: played.made(*given, **{**default, **size})
    )
    threads = torch.get_num_threads()
    yield played
    torch.set_num_threads(threads)


@pytest.fixture
def call(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f'{{"id": "{name}", "text": "def {name}"}}\n' for name in "abc")
    (tmp_path / "mine.jsonl").write_text(rows)
    models = ["--target", str(folders[0]), "--draft", str(folders[1]), "--prompts", "mine.jsonl"]

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["polydraft", name, *models, *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.err == ""
    return [json.loads(line) for line in captured.out.splitlines()]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in TIMED}
    return kept | {"statistics": {**kept["statistics"], "seconds": None}}


def test_runs_of_actors_are_those_of_one_process_in_its_order(
    call: Call, actors: Actors, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("bench", *BENCH) == 0
    head, *alone = lines(capsys)
    assert call("bench", *BENCH, "--ray", "--replicas", "2", "--threads", "1", "--out", "runs.jsonl") == 0
    there, *found = lines(capsys)
    assert there["machine"]["processor"] == "nodes of a Ray cluster" and there["machine"]["threads"] == 1
    assert {**there, "machine": None} == {**head, "machine": None}
    runs = [[row for row in rows if row["kind"] == "run"] for rows in (alone, found)]
    assert len(runs[0]) == 3 * 2 * 2
    assert list(map(untimed, runs[0])) == list(map(untimed, runs[1]))
    assert all("place" not in run for run in runs[0])
    assert {run["place"]["actor"] for run in runs[1]} == {"a" * 8, "b" * 8}
    for one in runs[1]:  # the arms of a round, which are compared, are of one actor
        assert {run["place"]["actor"] for run in runs[1] if run["prompts"] == one["prompts"]} >= {one["place"]["actor"]}
    by_round: dict[str, set[str]] = {}
    for run in runs[1]:
        by_round.setdefault(f"{run['prompts']} {run['temperature']}", set()).add(run["place"]["actor"])
    assert len(by_round) == 6 and all(len(names) == 1 for names in by_round.values())
    efficiency = [
        [(row["arm"], row["temperature"], row["block_efficiency"]) for row in rows if row["kind"] == "result"]
        for rows in (alone, found)
    ]
    assert efficiency[0] == efficiency[1] and len(efficiency[0]) == 4
    written = [json.loads(line) for line in Path("runs.jsonl").read_text().splitlines()][1:]
    assert [row["prompts"] for row in written] == [run["prompts"] for run in reversed(runs[1])], "as they came"
    assert read_speed_results(Path("runs.jsonl"))[1][0].place == RayActor(
        "a" * 8, written[0]["place"]["processor"], written[0]["place"]["cores"]
    )
    assert actors.sizes[0]["cpus"] == 1 and actors.sizes[-1]["copies"] == (2, 2)


def test_ctrl_c_keeps_what_actors_told_and_the_same_call_goes_on(
    call: Call, actors: Actors, capsys: pytest.CaptureFixture[str]
) -> None:
    actors.stop_after = 4
    tables = [one for one in BENCH if one != "--json"]
    assert call("bench", *tables, "--ray", "--replicas", "2", "--out", "runs.jsonl") == 130
    shown = capsys.readouterr()
    assert "the finished rounds are in runs.jsonl; the same command goes on from there" in shown.err
    assert len(Path("runs.jsonl").read_text().splitlines()) == 1 + 4 * 2
    assert call("bench", *tables, "--ray", "--out", "runs.jsonl") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert len(actors.sent[-1][1]) == 2 and "2 actors of a Ray cluster measured: 2 on " in shown
    assert "They had 1 CPU thread each." in shown
    assert "timings of several machines are compared within a prompt alone" in shown
    assert call("bench", *tables, "--out", "runs.jsonl") == 2
    assert "machine processor is nodes of a Ray cluster there" in capsys.readouterr().err


def test_limits_of_actors_are_those_of_one_process(
    call: Call, actors: Actors, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("limits", *LIMITS) == 0
    head, *alone = lines(capsys)
    assert call("limits", *LIMITS, "--ray", "--replicas", "2", "--out", "out") == 0
    there, *found = lines(capsys)
    assert there.pop("actors").startswith("2 actors of a Ray cluster measured: 2 on ")
    assert there == head and found == alone and len(found) > 10
    assert call("limits", *LIMITS, "--out", "out") == 0, "nothing timed: either way goes on from the other's records"
    assert lines(capsys)[1:] == alone


def test_nodes_with_other_models_are_refused(folders: tuple[Path, Path]) -> None:
    loaded: Any = SimpleNamespace(conditions={"target": {"weights": "aa"}}, plan=lambda: 3)
    copy = measured_on_ray.MeasuringCopy(lambda _: loaded, None, 1)
    assert copy([None]) == (loaded.conditions, 3)
    with pytest.raises(ClusterError, match="do not have the same models: target weights is bb there and aa here"):
        measured_on_ray.MeasuringCopy(lambda _: loaded, None, 1, {"target": {"weights": "bb"}})


@pytest.mark.parametrize("name", ["bench", "limits"])
def test_without_ray_it_is_said_what_is_missing(
    name: str, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert call(name, "--ray") == 2
    captured = capsys.readouterr()
    assert "A Ray cluster needs ray, which is not installed" in captured.err and captured.err.count("\n") == 1


def test_files_of_this_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.catalogue.digests", lambda: {"rule.py:Mine": "ab"})
    options = SimpleNamespace(ray=True, device="auto")
    with pytest.raises(InvalidParameter, match=r"rule\.py:Mine is a file of this machine: with --ray name a rule"):
        measured_on_ray.check_measured_on_ray(options, ["naive", "rule.py:Mine"], [])
