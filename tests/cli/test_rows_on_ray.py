"""Files of texts from a Ray cluster: each row once, equal to what one process writes, also where an actor is killed."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray installs Ray")

import ray
from doubles import perturbed, tiny_model, tiny_tokenizer

from polydraft.cli.generation.job import run
from polydraft.errors import ClusterError
from polydraft.options.commands.generate_options import GenerateOptions

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]
ROWS = 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny target and its draft."""
    folder, tokenizer = tmp_path_factory.mktemp("pair"), tiny_tokenizer()
    target = tiny_model(vocab=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=512)
    for name, model in {"target": target, "draft": perturbed(target, 0.02)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Run a cluster of this machine alone, of two CPUs."""
    ray.init("local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def options(pair: Path, folder: Path, output: str, **given: Any) -> GenerateOptions:
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"r{number}", "prompt": f"{number} and the"} for number in range(ROWS)]
    for row in rows[::3]:
        row |= {"temperature": 0.8, "max_new_tokens": 16}
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    named: dict[str, Any] = {"target": str(pair / "target"), "draft": str(pair / "draft"), "dtype": "float64"}
    files: dict[str, Any] = {"input_file": prompts, "output": folder / output, "batch_size": 2, "quiet": True}
    return GenerateOptions(**named, **files, max_new_tokens=24, seed=5, **given)


def lines_of(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    found[0].pop("settings")
    return sorted(found, key=lambda line: line["line"])


def writers() -> list[int]:
    """Return the processes that hold copies of the models."""
    shown = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in shown.splitlines() if " ray::" in line and "ModelCopy" in line]


def test_a_killed_actor_costs_no_row(pair: Path, tmp_path: Path) -> None:
    output, killed = tmp_path / "ray.jsonl", list[int]()

    def kill() -> None:
        while not output.exists() or len(output.read_text().splitlines()) < ROWS // 8:
            time.sleep(0.05)
        killed.extend(writers()[:1])
        os.kill(killed[0], signal.SIGKILL)

    harm = threading.Thread(target=kill, daemon=True)
    harm.start()
    assert run(options(pair, tmp_path, "ray.jsonl", ray=True, replicas="2")) == 0
    harm.join(5)
    assert killed and run(options(pair, tmp_path, "one.jsonl")) == 0
    found = lines_of(output)
    assert len(found) == ROWS and found == lines_of(tmp_path / "one.jsonl")


def test_a_file_goes_on_where_it_was(pair: Path, tmp_path: Path) -> None:
    assert run(options(pair, tmp_path, "one.jsonl")) == 0
    whole = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ray.jsonl").write_text("".join(whole[: ROWS // 2]) + whole[-1][:20])
    assert run(options(pair, tmp_path, "ray.jsonl", ray=True)) == 0
    assert lines_of(tmp_path / "ray.jsonl") == lines_of(tmp_path / "one.jsonl")


def test_models_that_cannot_be_loaded_are_said_once(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wrong = options(pair, tmp_path, "ray.jsonl", ray=True)
    with pytest.raises(ClusterError) as refused:
        run(GenerateOptions(**{**vars(wrong), "target": str(tmp_path / "empty")}))
    assert str(tmp_path / "empty") in str(refused.value) and not (tmp_path / "ray.jsonl").exists()
