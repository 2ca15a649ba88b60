"""Models by hub name, from a hub on this machine: what it has, its cache has, it keeps back, or nobody has."""

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from doubles import tiny_model, tiny_tokenizer

import polydraft
from polydraft.errors import CheckpointError
from polydraft.models.checkpoints.folders import find

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = (404, "RepoNotFound")
ERRORS = {"secret": (403, "GatedRepo"), "tired": (503, "Busy"), "hollow": (404, "EntryNotFound")}
"""Models that are kept back, behind a server that is busy, and without a config.json."""
NAME, MODEL = "some/model", "model"


class Shelf(BaseHTTPRequestHandler):
    """Answers for the files of one model as the hub does, and counts the questions."""

    def __init__(self, folder: Path, asked: list[str], *arguments: object) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        model, _, file = self.path.removeprefix("/some/").partition("/resolve/")
        path = self.folder / file.partition("/")[2]
        if self.path.startswith(f"/api/models/{NAME}"):
            self.answer(200, "", json.dumps(self.listed()).encode())
        elif model == MODEL and path.is_file():
            self.answer(200, "", path.read_bytes())
        else:
            self.answer(*((404, "EntryNotFound") if model == MODEL else ERRORS.get(model, NOBODY)), b"")

    def listed(self) -> object:
        """Return the list of files, or what the model is."""
        names = [{"type": "file", "path": one.name, "oid": one.name, "size": 1} for one in self.folder.iterdir()]
        return names if "/tree/" in self.path else {"id": NAME, "sha": COMMIT, "siblings": []}

    def answer(self, status: int, code: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("ETag", f'"{hash(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


def put_hub_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the hub an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Save a model with its tokenizer."""
    tiny_model("llama", len(tiny_tokenizer()), dtype=torch.float32).save_pretrained(tmp_path / "original")
    tiny_tokenizer().save_pretrained(tmp_path / "original")
    return tmp_path / "original"


@pytest.fixture
def asked(cache: Path, original: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run a hub that has one model, and return what it is asked for."""
    questions: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Shelf, original, questions))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    put_hub_at(server.server_port, monkeypatch)
    yield questions
    server.shutdown()
    thread.join()
    server.server_close()
    huggingface_hub.close_session()


@pytest.fixture
def alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nobody answer."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    put_hub_at(port, monkeypatch)
    yield
    huggingface_hub.close_session()


def refusal(name: str) -> str:
    """Return the text of the error for a name, having checked that it comes at once."""
    began = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        polydraft.load(name)
    assert time.perf_counter() - began < 5
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    return str(caught.value)


def put_into_cache(cache: Path, original: Path) -> None:
    folder = cache / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    for file in original.iterdir():
        (folder / "snapshots" / COMMIT / file.name).write_bytes(file.read_bytes())


def test_the_hub_has_it(asked: list[str]) -> None:
    assert len(polydraft.load(NAME).tokenizer) == len(tiny_tokenizer())
    assert any(path.endswith("model.safetensors") for path in asked)


def test_a_local_folder_goes_first(asked: list[str], original: Path) -> None:
    (original.parent / "some").mkdir()
    original.rename(original.parent / NAME)
    polydraft.load(NAME)
    assert not asked


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("some/other", "it has none, or a private one for which HF_TOKEN must be set"),
        ("some/secret", "access to it must be asked for there"),
        ("some/tired", "it answers with status 503"),
        ("some/hollow", "what it has of that name holds no config.json"),
    ],
)
def test_the_hub_does_not_give_it(asked: list[str], name: str, said: str) -> None:
    text = refusal(name)
    assert text.startswith(f"There is no model folder '{name}', and the Hugging Face hub does not give a model of that")
    assert said in text
    assert len([path for path in asked if "/resolve/" in path]) == 1, "once is enough"


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing", "models/lama"])
def test_nobody_answers(alone: None, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("models").mkdir()
    text = refusal(name)
    assert text.startswith(f"There is no model folder '{name}', and the Hugging Face hub does not give")
    assert "there is no connection to it (ConnectError)" in text
    assert capfd.readouterr() == ("", "")


def test_the_cache_has_it(alone: None, cache: Path, original: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put_into_cache(cache, original)
    capfd.readouterr()
    began = time.perf_counter()
    assert len(polydraft.load(NAME).tokenizer) == len(tiny_tokenizer())
    assert time.perf_counter() - began < 20
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("cached", [True, False])
def test_the_hub_is_not_to_be_asked(
    asked: list[str], cache: Path, original: Path, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if cached:
        put_into_cache(cache, original)
        polydraft.load(NAME)
    else:
        assert "in the Hugging Face hub's cache; the hub is not asked, since HF_HUB_OFFLINE is set." in refusal(NAME)
    assert not asked
    assert huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["./modl", "../x/y", "models/lama/v2", "/nowhere/at/all", "~nobody-of-this-name/x"])
def test_what_can_only_be_a_folder_is_not_asked_for(asked: list[str], name: str) -> None:
    assert refusal(name) == f"There is no model folder '{name}'."
    assert not asked


@pytest.mark.parametrize("name", ["my model", "x" * 97, "org--x/y", "a\0b", "bad\udc80name", "\ud800", "x.git"])
def test_what_no_model_can_be_called_is_not_asked_for(asked: list[str], name: str) -> None:
    assert "and a model on the Hugging Face hub cannot have that name." in refusal(name)
    assert not asked


@pytest.mark.parametrize("name", ["", "  ", 5, None, b"gpt2", ["gpt2"], "/" + "x" * 300, "x" * 5000])
def test_what_is_no_name(asked: list[str], name: object) -> None:
    with pytest.raises(CheckpointError, match=r"^[^\n]{10,400}\.$"):
        find(name)
    assert not asked


def test_a_folder_below_the_home_folder(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(original.parent))
    assert polydraft.load("~/original").draft is None
