"""The tiny model that engines load, and our own server with it, over HTTP."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from serving import served

from polydraft.cli import main
from polydraft.conformance import joint_law
from polydraft.conformance.http.copied_law import CopiedModel
from polydraft.conformance.http.engines import SampledText, ToldToken
from polydraft.conformance.http.served_tests import TINY_PROMPT, ServerTest, check_copy, check_tiny
from polydraft.conformance.http.server_client import ServerClient
from polydraft.errors import InvalidParameter, ServerError
from polydraft.models import Pair, export_tiny, load
from polydraft.probs import SamplingParams

pytest.importorskip("fastapi", reason="the server needs the extra serve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exported") / "tiny"
    assert {"model.safetensors", "tokenizer.json", "config.json", "tiny.gguf", "Modelfile"} <= {*export_tiny(made)}
    return made


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Pair:
    return load(folder, dtype="float64")


def copied(tiny: Pair) -> CopiedModel:
    return CopiedModel(tiny.target, tiny.tokenizer, None, SamplingParams())


def test_every_character_is_a_token_and_texts_never_end(folder: Path, tiny: Pair) -> None:
    text = "the cat sat.\nabc"
    ids = tiny.tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tiny.tokenizer.decode(ids) == text
    with torch.no_grad():
        rows = tiny.target(input_ids=torch.tensor([ids])).logits[0].softmax(dim=-1)
    assert float(rows[:, :3].max()) < 1e-8, "end of text, and what llama.cpp needs a merge for"
    assert float(rows.max()) < 0.6 and float((rows[4] - rows[12]).abs().sum()) > 0.1, "laws depend on what was read"
    config = json.loads((folder / "config.json").read_text())
    assert config["head_dim"] == 64 and config["vocab_size"] == 32 and config["dtype"] == "float32"


def test_the_gguf_file_is_the_same_model(folder: Path, tiny: Pair) -> None:
    other = load(folder / "tiny.gguf", dtype="float64")
    ids = torch.tensor([tiny.tokenizer("abcabc the")["input_ids"]])
    assert other.tokenizer("abcabc the")["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        gap = other.target(input_ids=ids).logits - tiny.target(input_ids=ids).logits
    assert float(gap.abs().max()) < 1e-6


def test_a_folder_with_files_is_not_written_into(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="holds files already"):
        export_tiny(folder)


def test_texts_that_are_told_by_their_pieces_are_read(tiny: Pair) -> None:
    copy = copied(tiny)
    pieces = tuple(ToldToken(-1.0, None, one) for one in (b"a", b" ", b"QQ"))
    assert copy.read(SampledText("a QQ", None, pieces), "there") == (tiny.tokenizer("a QQ")["input_ids"], True)
    strange = (*pieces, ToldToken(-1.0, None, b"zz"))
    tokens, sure = copy.read(SampledText("a QQ", None, strange), "there")
    assert tokens == tiny.tokenizer("a QQ")["input_ids"] and not sure
    assert copy.read(SampledText("ab", (3, 4), (), True), "there") == ([3, 4, 0], True)
    with pytest.raises(ServerError, match="wrote the token 32, but the copy's tokens are 0 to 31"):
        copy.read(SampledText("a", (32,)), "there")
    assert copy.lost_by_spelling([[3, 4, 5]]) == 0, "characters come back from their text"


def test_several_ends_of_text_are_one_outcome(tiny: Pair) -> None:
    copy = copied(tiny)
    copy.ends = (0, 5)
    law = copy.rows(tiny.target, [3], [[4, 5, 6]], SamplingParams())[0]
    plain = copied(tiny).rows(tiny.target, [3], [[4, 5, 6]], SamplingParams())[0]
    assert torch.allclose(law[:, 0], plain[:, 0] + plain[:, 5]) and float(law[:, 5].max()) == 0
    assert copy.outcomes([4, 5, 0]) == [4, 0, 0]


def test_rows_are_the_law_of_every_place(tiny: Pair) -> None:
    copy = copied(tiny)
    rows = copy.rows(tiny.target, [3, 4], [[5, 6, 7], [8]], SamplingParams(temperature=0.7))
    law = joint_law(tiny.target, [3, 4, 5, 6], 1, SamplingParams(temperature=0.7)).probs
    assert [len(one) for one in rows] == [3, 1] and torch.allclose(rows[0][2], law)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(target=str(folder), dtype="float32", batch_size=32, drafter="ngram") as found:
        yield found


def silent(what: str, done: int, total: int) -> None:
    assert what and done <= total


def test_our_server_passes_with_the_whole_law_and_with_bets(address: str, tiny: Pair) -> None:
    client = ServerClient(address)
    try:
        assert client.engine.name == "polydraft"
        report = check_tiny(client, copied(tiny), ServerTest(most_tokens=1_500), silent)
        assert report.passed and report.texts == 500 and report.law is not None
        assert list(report.law.prompts[0].prompt) == tiny.tokenizer(TINY_PROMPT)["input_ids"]
        bets = check_copy(client, copied(tiny), ServerTest(most_tokens=2_048), silent)
        assert bets.passed and bets.tokens == 2_048 and json.dumps(asdict(bets))
    finally:
        client.close()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["polydraft", "conformance", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_the_command_tests_a_server(
    address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--url", f"{address}/v1", "--most-tokens", "600")
    assert run(monkeypatch, *few, "--tiny", str(folder), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and report["texts"] == 200 and report["false_alarm"] == 1e-3
    assert run(monkeypatch, *few, "--trust-logprobs") == 0
    assert "self-consistent is not exact" in capsys.readouterr().out
    assert run(monkeypatch, *few, "--copy", "pair", "--json") == 2, "another model"
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and "status 400: prompt has the token" in said.err


def test_a_wrong_temperature_ends_it_with_code_1_and_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    export_tiny(other, seed=5)
    with served(target=str(other), dtype="float32", batch_size=32, drafter="none") as address:
        assert run(monkeypatch, "--url", address, "--copy", str(folder), "--most-tokens", "2048") == 1
        shown = capsys.readouterr().out
        assert "deviates" in shown and "Tokens most unlike the law there" in shown and "\x1b" not in shown
        assert run(monkeypatch, "--url", address, "--tiny", str(folder), "--most-tokens", "3000", "--json") == 1
        assert json.loads(capsys.readouterr().out)["law"]["prompts"][0]["worst"]["tokens"]


def test_the_command_writes_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "--export", str(tmp_path / "a"), "--json") == 0
    assert "tiny.gguf" in json.loads(capsys.readouterr().out)["files"]
    assert run(monkeypatch, "--export", str(tmp_path / "a")) == 2
    assert "holds files already" in capsys.readouterr().err


BAD_CALLS = [
    (["--url", "http://h"], "--url needs one of --tiny FOLDER, --copy MODEL and --trust-logprobs"),
    (
        ["--url", "http://h", "--tiny", ".", "--trust-logprobs"],
        "say differently what the texts should be: give one of them",
    ),
    (["--url", "http://h", "--trust-logprobs", "--draft", "pair-draft"], "--draft goes with --copy"),
    (["--url", "http://h", "--tiny", ".", "--tolerance", "0.1"], "--tiny tests without a tolerance"),
    (["--url", "http://h", "--copy", ".", "--quick"], "--quick is for rules"),
    (["--url", "http://h", "--tiny", ".", "--chat"], "--tiny has no chat template"),
    (["--url", "http://h", "--trust-logprobs", "--false-alarm", "1"], "--false-alarm must be in (0, 0.5], but is 1.0"),
    (["--url", "nowhere", "--trust-logprobs"], "--url must be like"),
    (["--url", "http://127.0.0.1:9", "--trust-logprobs"], "There is no server at http://127.0.0.1:9"),
    (["--tiny", "."], "--tiny is for a server, and none is named"),
    (["--most-tokens", "100"], "--most-tokens is for a server"),
    (["--export", "x", "--url", "http://h"], "--export writes a folder and --url tests a server"),
    (["--export", "x", "--copy", "."], "--copy is for a server, and --export only writes"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_CALLS, ids=[said for _, said in BAD_CALLS])
def test_bad_calls_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out and said in captured.err and captured.err.count("\n") == 1
