"""The scripts in examples/, as users run them, on the embedded pair."""

import json
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.models.loading import SHIPPED

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
TESTED = {
    "own_checkpoint",
    "batch_file",
    "structured_output",
    "own_verifier",
    "server_and_client",
    "ray_on_one_machine",
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


@pytest.mark.parametrize("draft", ["pair-draft", None])
def test_own_checkpoint(draft: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["--target", str(SHIPPED["pair"]), *(("--draft", str(SHIPPED[draft])) if draft else ())]
    run("own_checkpoint", monkeypatch, *folders, "--prompt", "class Point:", "--max-new-tokens", "8")
    text, told = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert text.startswith("class Point:") and told.startswith("8 tokens in ")


def test_batch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]
    lines = (json.dumps({"id": name, "prompt": f"def {name}("}) for name in names)
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    texts = tmp_path / "texts.jsonl"
    run("batch_file", monkeypatch, str(tmp_path / "prompts.jsonl"), str(texts), "--max-new-tokens", "6")
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == names and all(row["text"] for row in rows)


def test_structured_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("structured_output", monkeypatch)
    out = capsys.readouterr().out
    assert out.startswith("{'kind': 'f") and "'size': " in out


def test_own_verifier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("own_verifier", monkeypatch)
    proof, text = capsys.readouterr().out.split("\n", 1)
    assert proof.startswith("exact: True") and text.startswith("def add(a, b):")


@pytest.mark.slow
def test_server_and_client() -> None:
    command = [sys.executable, str(EXAMPLES / "server_and_client.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip().endswith("tokens per pass of the target")


@pytest.mark.ray
def test_ray_on_one_machine() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(EXAMPLES / "ray_on_one_machine.py"), "--port", port, "--max-tokens", "24"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    texts, told, _ = ended.stdout.partition("polydraft:worker_lost_total")
    assert told and len(texts.split()) > 10
