"""`polydraft store`: files become a store, a store is shown, and one sentence where that cannot be."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polydraft
from polydraft.bench.prompts.prompt import encode
from polydraft.cli import stores as build
from polydraft.cli.commands import app
from polydraft.drafters import StoreVocabulary, StoreWriter, TextStore
from polydraft.errors import InvalidParameter, PromptFileError, StoreError, VocabularyMismatch

CODE = "def add(a, b):\n    return a + b\n"


def call(*arguments: object) -> tuple[int, str, str]:
    given = ["store", *map(str, arguments)]
    ended = CliRunner().invoke(app, given, catch_exceptions=False, standalone_mode=False)
    return ended.return_value or ended.exit_code, ended.stdout, ended.stderr


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    (folder / "inner" / ".hidden").mkdir(parents=True)
    (folder / "one.py").write_text(CODE)
    (folder / "inner" / "two.txt").write_text("class A:\n    pass\n")
    (folder / "inner" / ".hidden" / "three.txt").write_text("not read")
    rows: list[dict[str, Any]] = [
        {"prompt": "def f(", "output": "x):\n    return x\n"},
        {"text": "import os\n"},
        {"question": "def g(", "answer": "y): ..."},
    ]
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    return folder


def texts_of(folder: Path) -> list[str]:
    tokenizer, found = polydraft.load_pair().tokenizer, list[str]()
    for one in TextStore(folder).segments:
        text: list[int] = []
        for token in one.tokens[1:].tolist():
            if token == 0xFFFFFFFF:
                found.append(tokenizer.decode(text))
                text = []
            else:
                text.append(token)
    return found


@pytest.mark.long(1)
@pytest.mark.parametrize("kind", ["suffix", "rest"])
def test_files_become_a_store_that_drafts(files: Path, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "store"
    code, said, _ = call("build", files, "--out", out, "--kind", kind)
    assert code == 0 and "Added 5 texts" in said and "of the embedded pair (8192 tokens)" in said
    assert sorted(texts_of(out)) == sorted(
        [CODE, "class A:\n    pass\n", "def f(x):\n    return x\n", "import os\n", "def g(y): ..."]
    )
    facts = json.loads(call("show", out, "--json")[1])
    assert facts["texts"] == 5 and facts["bytes"] == sum(one["bytes"] for one in facts["segments"])
    assert facts["tokenizer"] == "the embedded pair" and 8 < facts["bytes_per_token"] < 20
    assert facts["most_bytes"] == (None if kind == "rest" else 1 << 28)
    code, said, _ = call("show", out)
    assert ("It is only read." in said) == (kind == "rest") and ("It may grow to 268 MB." in said) == (kind != "rest")
    assert code == 0 and "holds 5 texts" in said and "0000000001-0000000001.segment" in said
    given = ["generate", "def add(", "--drafter", f"{kind}:{out}", "--max-new-tokens", "12", "--json"]
    ended = CliRunner().invoke(app, given, catch_exceptions=False, standalone_mode=False)
    plain = CliRunner().invoke(app, [*given[:2], "--drafter", "none", *given[4:]], standalone_mode=False)
    found = json.loads(ended.stdout)
    assert found["text"] == json.loads(plain.stdout)["text"] and found["settings"]["drafter"] == kind
    assert found["statistics"]["drafted"] > 0


def test_a_store_that_grows_takes_more_and_one_that_is_read_does_not(files: Path, tmp_path: Path) -> None:
    for kind in ("suffix", "rest"):
        assert call("build", files, "--out", tmp_path / kind, "--kind", kind)[0] == 0
    code, said, _ = call("build", files / "one.py", "--out", tmp_path / "suffix", "--json")
    told = json.loads(said)
    assert code == 0 and (told["added_texts"], told["texts"], told["finish"]) == (1, 6, "done")
    with pytest.raises(InvalidParameter, match="holds a store already; name a new folder"):
        call("build", files, "--out", tmp_path / "rest", "--kind", "rest")
    with pytest.raises(StoreError, match="was built to be only read, and takes no texts: name another folder"):
        call("build", files, "--out", tmp_path / "rest")


def test_conversations_go_through_the_template(chat_folder: Path, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "hello"}]
    rows = [{"messages": asked, "output": "there"}, {"messages": [*asked, {"role": "assistant", "content": "you"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert call("build", tmp_path / "rows.jsonl", "--out", tmp_path / "store", "--target", chat_folder)[0] == 0
    pair = polydraft.load(chat_folder)
    from polydraft.bench.prompts import Prompt
    from polydraft.models import Message

    prompt = encode(pair, Prompt("", "", "hello", messages=(Message("user", "hello"),)))[0].tolist()
    whole = TextStore(tmp_path / "store").segments[0].tokens.tolist()
    assert whole[1 : 1 + len(prompt)] == prompt, "what a chat sends is found in the store"


def test_bad_files_are_reported_and_the_others_kept(files: Path, tmp_path: Path) -> None:
    (files / "binary.bin").write_bytes(b"abc\0def")
    (files / "latin.txt").write_bytes(b"caf\xe9")
    (files / "broken.json").write_text('{"text": "good text here"}\n{"text"\n[1]\n{"name": 1}\n{"text": 3}\n')
    (files / "cut.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    code, said, errors = call("build", files, "--out", tmp_path / "store", "--json")
    left = json.loads(said)["left_out"]
    assert code == 1 and json.loads(said)["added_texts"] == 6 and not errors
    for part in (
        "binary.bin: it is no text",
        "latin.txt: it is not UTF-8",
        "broken.json, line 2: not JSON",
        "line 3: the row is a list, not an object",
        "line 4: the row has no text",
        "line 5: text is no text",
        "cut.txt.gz: it cannot be read",
    ):
        assert any(part in one for one in left), (part, left)
    code, _, errors = call("build", files, "--out", tmp_path / "other")
    assert code == 1 and errors.count("Left out: ") == 6 and "Left out: 2 more." in errors


def test_what_cannot_be_is_said_in_a_sentence(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.raises(PromptFileError, match="there is no such file or folder"):
        call("build", tmp_path / "nowhere", "--out", out)
    (tmp_path / "bare").mkdir()
    with pytest.raises(PromptFileError, match="There is no file in"):
        call("build", tmp_path / "bare", "--out", out)
    with pytest.raises(StoreError, match="is no store of texts: it holds"):
        call("build", files, "--out", files)
    (tmp_path / "short.txt").write_text(" \n")
    with pytest.raises(StoreError, match="Nothing was stored"):
        call("build", tmp_path / "short.txt", "--out", out)
    with StoreWriter(tmp_path / "theirs", StoreVocabulary(8192, b"t" * 32, "theirs")) as writer:
        writer.add([1, 2, 3])
    with pytest.raises(VocabularyMismatch, match=r"holds tokens of theirs \(8192 tokens\), and the target's are those"):
        call("build", files, "--out", tmp_path / "theirs")
    with pytest.raises(StoreError, match="There is no store of texts at"):
        call("show", tmp_path / "nowhere")
    with pytest.raises(Exception, match="'tree' is not one of 'suffix', 'rest'"):
        call("build", files, "--out", out, "--kind", "tree")
    path = next((tmp_path / "theirs").glob("*.segment"))
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    with pytest.raises(StoreError, match="is damaged"):
        call("show", tmp_path / "theirs")


@pytest.mark.slow
def test_stores_have_their_sizes(files: Path, tmp_path: Path) -> None:
    for number in range(8):
        (files / f"long{number}.txt").write_text(" ".join(f"x{number}y{one}" for one in range(20_000)))
    for kind in ("rest", "suffix"):
        code, _, errors = call("build", files, "--out", tmp_path / kind, "--kind", kind, "--most-mb", 2)
        assert code == 0 and TextStore(tmp_path / kind).size <= 2_000_000
        assert ("The store has its 2 MB; the rest is left out." in errors) == (kind == "rest")
    assert call("build", files, "--out", tmp_path / "suffix")[0] == 0
    assert TextStore(tmp_path / "suffix").size <= 2_000_000, "the folder keeps its bound"


def test_an_interrupt_leaves_a_whole_store(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(StoreWriter):
        def add(self, tokens: Any) -> None:
            if self.texts == 3:
                raise KeyboardInterrupt
            super().add(tokens)

    monkeypatch.setattr(build, "StoreWriter", Interrupted)
    code, said, errors = call("build", files, "--out", tmp_path / "store")
    assert code == 130 and "holds the 3 texts that were read" in errors and "Added 3 texts" in said
    assert TextStore(tmp_path / "store").texts == 3


def test_drafters_without_their_store_are_refused_before_models_are_loaded(tmp_path: Path) -> None:
    for word, says in {
        "rest": "needs a store: write rest:FOLDER",
        "suffix:": "write suffix:FOLDER, or suffix alone",
        f"rest:{tmp_path}/nowhere": "There is no store of texts at",
    }.items():
        given = ["generate", "x", "--drafter", word, "--target", str(tmp_path)]
        with pytest.raises((InvalidParameter, StoreError), match=says):
            CliRunner().invoke(app, given, catch_exceptions=False, standalone_mode=False)
    for word, says in {
        "ngram:x": r"from 1 to 999999, not 'x': write ngram:3, or ngram alone",
        "recycling:x": "'recycling:x' is not known .did you mean recycling",
    }.items():
        with pytest.raises(Exception, match=says):
            CliRunner().invoke(app, ["generate", "x", "--drafter", word], catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize(
    ("folder", "told"),
    [("~nosuchuser/x", "no home folder"), pytest.param("a" * 300, "File name too long", marks=pytest.mark.slow)],
)
def test_names_that_nothing_can_have_are_one_sentence(folder: str, told: str) -> None:
    command = [sys.executable, "-c", "from polydraft_command import main; main()", "store", "show", folder]
    ran = subprocess.run(command, capture_output=True)
    assert ran.returncode == 2 and told in ran.stderr.decode()
