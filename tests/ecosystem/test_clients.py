"""The programs of docs/ecosystem.md, as they stand there, with a model and a server that are here."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("langchain_openai", reason="make test-ecosystem installs it")
pytest.importorskip("llm", reason="make test-ecosystem installs it")
pytest.importorskip("trl", reason="make test-ecosystem installs it")

import httpx
from serving import served

from polydraft.models.loading import SHIPPED

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]
PAGE = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def block(kind: str, word: str) -> str:
    """Return the only program of a kind on the page that has a word."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    (one,) = (text for own, text in found if own == kind and word in text)
    return one


@dataclass(frozen=True)
class Server:
    """Where the model is served, under which name, and its folder."""

    address: str
    name: str
    folder: Path

    def said(self, text: str) -> str:
        """Return a program with this server and this model in place of the page's."""
        places = {ADDRESS: self.address, "NAME": self.name, "FOLDER": str(self.folder), "OUT": str(self.folder / "out")}
        for word, place in places.items():
            text = text.replace(word, place)
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(SHIPPED["pair"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    card = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**card, "pad_token": "<|endoftext|>"}))
    with served(target=str(folder), model_name="tested") as address:
        yield Server(address, "tested", folder)


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    """The greedy answer, without drafts."""
    asked = {"messages": [{"role": "user", "content": "A function that adds."}], "max_tokens": 16, "temperature": 0}
    plain = {**asked, "speculative": {"enabled": False}}
    answer = httpx.post(f"{server.address}/v1/chat/completions", json=plain, timeout=60).json()
    text = answer["choices"][0]["message"]["content"]
    assert len(text) > 10
    return text


@pytest.fixture
def python(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Run a program of the page, and return what it says."""
    monkeypatch.setenv("WANDB_MODE", "disabled")

    def said(word: str) -> str:
        exec(compile(server.said(block("python", word)), "docs/ecosystem.md", "exec"), {})
        return capsys.readouterr().out

    return said


def test_openai(python: Callable[[str], str], expected: str) -> None:
    said = python("from openai")
    assert said.startswith(expected) and re.search(r"\d tokens a pass$", said.strip())


def test_langchain(python: Callable[[str], str], expected: str) -> None:
    assert python("langchain_openai") == f"{expected}\n{expected}\n"


def shell(server: Server, word: str, **variables: str) -> str:
    places = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    command = ["bash", "-ec", server.said(block("", word))]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **places})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_curl(server: Server, expected: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    answer = json.loads(shell(server, "curl"))
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["metrics"]["speculative_decoding"]["lossless"]


def test_llm(server: Server, expected: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(server.said(block("yaml", "api_base")))
    assert shell(server, "llm -m", LLM_USER_PATH=str(tmp_path)).strip() == expected.strip()


def test_a_pipeline(python: Callable[[str], str]) -> None:
    assert python("pipeline").startswith("def add(a, b):\n")


def test_trl(python: Callable[[str], str]) -> None:
    assert re.search(r"^[\d.]+ tokens a pass$", python("GRPOTrainer"), flags=re.MULTILINE)
