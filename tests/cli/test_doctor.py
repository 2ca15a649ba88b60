"""`polydraft doctor`: what it tells of this machine, what it finds, and that nothing that is broken breaks it."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from polydraft.cli.commands import app
from polydraft.cli.setup import installed, machine_facts
from polydraft.cli.setup.findings import FAILS, SLOW, Finding, of_folders, of_machine
from polydraft.cli.setup.kept_folders import COMPILED, FETCHED, KeptFolder, kept_folders
from polydraft.cli.setup.machine_facts import MachineFacts, usable_cpus
from polydraft.extras import EXTRAS, Extra

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def call(*arguments: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False, standalone_mode=False)
    return ended.return_value or ended.exit_code, ended.stdout


def told() -> tuple[int, dict[str, Any]]:
    code, out = call("--json")
    return code, json.loads(out)


def failing(report: dict[str, Any]) -> list[str]:
    return [one["sentence"] for one in report["findings"] if one["level"] == FAILS]


def test_it_tells_what_is_here() -> None:
    code, report = told()
    assert {one["name"] for one in report["packages"]} == {Requirement(one).name for one in PROJECT["dependencies"]}
    assert all(one["version"] for one in report["packages"])
    assert [one["name"] for one in report["extras"]] == [*EXTRAS]
    used = {one["what"]: one["value"] for one in report["generate"]}
    assert used["threads"] == str(torch.get_num_threads()) and used["device"] == torch.empty(0).device.type
    assert report["machine"]["torch"] == torch.__version__
    assert code == (1 if failing(report) else 0)


def test_what_generate_uses_is_what_load_takes() -> None:
    from polydraft import load_pair

    report = told()[1]
    used = {one["what"]: one["value"] for one in report["generate"]}
    target = load_pair().target
    assert str(target.device) == used["device"]
    assert str(target.dtype).removeprefix("torch.") in used["precision"]


def test_people_read_tables_and_a_line_for_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_MEASURE", "no")
    monkeypatch.setenv("POLYDRAFT_API_KEY", "a secret")
    out = call()[1]
    assert all(name in out for name in ("transformers", "serve", "processor", "threads", "machine code"))
    assert "slow  POLYDRAFT_MEASURE=no" in out and "a secret" not in out


def test_extras_that_are_not_installed_are_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    for requirement in {one for extra in EXTRAS.values() for one in extra.requirements}:
        monkeypatch.setitem(sys.modules, Requirement(requirement).name.replace("-", "_"), None)
    report = told()[1]
    for one in report["extras"]:
        assert (
            one["install"]
            == f"pip install {' '.join(f'{chr(34)}{line}{chr(34)}' for line in EXTRAS[one['name']].requirements)}"
        )
    assert not any("not installed" in sentence for sentence in failing(report))


def test_an_extra_of_another_version_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "figures", Extra("Figures need", ("torch>=99", "no-such-package>=1")))
    code, report = told()
    extra = next(one for one in report["extras"] if one["name"] == "figures")
    assert extra["install"] == 'pip install "no-such-package>=1"'
    assert code == 1 and any(sentence.startswith("Figures need torch>=99, but ") for sentence in failing(report))


def test_a_package_that_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["no-such-package>=1", 'pytest>=1; extra == "dev"']
    monkeypatch.setattr(installed.metadata, "requires", lambda _: lines)
    code, report = told()
    assert [one["name"] for one in report["packages"]] == ["no-such-package"]
    assert code == 1 and failing(report)[0] == (
        'polydraft needs no-such-package, which is not installed: pip install "no-such-package>=1".'
    )


def test_a_damaged_torch_is_told_and_the_rest_too(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('libtorch.so is damaged.')")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "polydraft", "doctor", "--json"]
    ended = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False)
    report = json.loads(ended.stdout)
    assert ended.returncode == 1 and report["machine"] is None and report["generate"] == []
    assert len(report["packages"]) == len(PROJECT["dependencies"]) and report["folders"]
    assert "What this machine has cannot be told: libtorch.so is damaged." in failing(report)


def test_a_variable_that_would_stop_a_call_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDRAFT_COPIED_MIB", "many")
    code, report = told()
    assert code == 1 and failing(report) == ["POLYDRAFT_COPIED_MIB must be a whole number of MiB, but is 'many'."]


GOOD = MachineFacts("a processor", 4, 4, 0.5, False, 1 << 34, "AVX2", ("float32",), (), False, "2.13.0+cpu", 1 << 30)
BAD: list[tuple[Callable[[MachineFacts], MachineFacts], str]] = [
    (lambda one: replace(one, driver=True), "sees no GPU"),
    (lambda one: replace(one, cpus=2), "set OMP_NUM_THREADS=2"),
    (lambda one: replace(one, threads=1), "lets torch use 1 of 4 CPUs"),
    (lambda one: replace(one, load=9.0, busy=True), "9.0 threads wanted"),
    (lambda one: replace(one, vectors="DEFAULT"), "AVX2"),
    (lambda one: replace(one, packed=()), "no oneDNN"),
    (lambda one: replace(one, copied=1 << 28), "Weights of more than 256 MiB"),
]


@pytest.mark.parametrize(("spoilt", "said"), BAD)
def test_what_makes_passes_slow_is_found(
    spoilt: Callable[[MachineFacts], MachineFacts], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not [*of_machine(GOOD)]
    (finding,) = of_machine(spoilt(GOOD))
    assert finding.level == SLOW and said in finding.sentence


def test_a_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "QUOTA", tmp_path / "cpu.max")
    allowed = usable_cpus()
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus() == allowed
    (tmp_path / "cpu.max").write_text("90000 100000\n")
    assert usable_cpus() == 1


def test_folders_are_counted_and_one_that_cannot_be_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists() and kept_folders()[0].files == 0
    (tmp_path / "cache" / "costs").mkdir(parents=True)
    (tmp_path / "cache" / "costs" / "one.json").write_text("{}")
    (tmp_path / "cache" / "again").symlink_to(tmp_path / "cache" / "costs" / "one.json")
    assert (kept_folders()[0].files, kept_folders()[0].size, kept_folders()[0].writable) == (1, 2, True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    (finding,) = of_folders(kept_folders()[:1])
    assert finding.level == FAILS and "set POLYDRAFT_CACHE to a folder that can" in finding.sentence


def test_a_disk_that_is_nearly_full_is_found() -> None:
    full = KeptFolder(FETCHED, "POLYDRAFT_CACHE", "/somewhere", writable=True, free=5 << 20)
    (finding,) = of_folders([full])
    assert finding.level == FAILS and finding.sentence.startswith("Only 5 MiB are free on the disk of /somewhere")
    nowhere = Finding(
        SLOW,
        "No folder for machine code can be written, so that every process compiles loops anew, for seconds: set "
        "NUMBA_CACHE_DIR to a folder that can.",
    )
    assert [*of_folders([KeptFolder(COMPILED, "NUMBA_CACHE_DIR", "")])] == [nowhere]
