"""`polydraft generate` with `--json-schema`, `--regex` and `--grammar`."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polydraft.cli.commands import app
from polydraft.errors import InvalidParameter

pytest.importorskip("llguidance")
SCHEMA = '{"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 3}'


def written(*options: str) -> str:
    arguments = ["generate", "def parse(", *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False).stdout


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_json_schema(tmp_path: Path, in_a_file: bool) -> None:
    schema = SCHEMA
    if in_a_file:
        (tmp_path / "schema.json").write_text(SCHEMA)
        schema = str(tmp_path / "schema.json")
    told = json.loads(written("--json-schema", schema, "--json", "--temperature", "1", "--seed", "1"))
    assert {*json.loads(told["text"])} <= {"red", "blue"}
    assert json.loads(told["settings"]["json_schema"]) == json.loads(SCHEMA)
    assert told["statistics"]["in_force"] == ["GrammarLogitsProcessor"]


def test_json_without_blanks() -> None:
    told = json.loads(written("--json-schema", SCHEMA, "--compact", "--json", "--temperature", "1", "--seed", "1"))
    assert told["text"] == json.dumps(json.loads(told["text"]), separators=(",", ":"))
    assert told["settings"]["compact"] is True


def test_a_regex_and_rules(tmp_path: Path) -> None:
    assert re.fullmatch("[a-z]{3,6}(, [a-z]{3,5}){2}\n", written("--regex", "[a-z]{3,6}(, [a-z]{3,5}){2}", "--quiet"))
    (tmp_path / "rules.lark").write_text('start: "yes" | "no" WORD\nWORD: /[a-z]{2}/')
    assert re.fullmatch("yes\n|no[a-z]{2}\n", written("--grammar", str(tmp_path / "rules.lark"), "--quiet"))


def test_a_file_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("def parse(\nclass A\n")
    arguments = ["generate", "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl")]
    CliRunner().invoke(app, [*arguments, "--regex", "[a-z]{3}!"], catch_exceptions=False, standalone_mode=False)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = [line["text"] for line in lines if "text" in line]
    assert len(texts) == 2 and all(re.fullmatch("[a-z]{3}!", text) for text in texts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--regex", "a", "--json-schema", "{}"], "--json-schema and --regex both say"),
        (["--regex", "(a"], "unclosed group"),
        (["--regex", "a", "--compact"], "--compact leaves the blanks of JSON out"),
        (["--json-schema", '{"x-guidance": {"whitespace_flexible": true}}', "--compact"], "both say what blanks"),
        (["--json-schema", "nowhere.json"], "'nowhere.json' cannot be read: No such file"),
        (["--json-schema", "{nope"], "is no JSON"),
        (["--json-schema", "a\x00b"], "cannot be read"),
        (["--json-schema", '{"uniqueItems": true}'], "uniqueItems"),
        (["--grammar", "."], "is a folder"),
        (["--grammar", "nowhere.lark"], "'nowhere.lark' cannot be read"),
    ],
)
def test_what_is_no_grammar_is_one_sentence(options: list[str], said: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        written(*options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "rules.lark").write_bytes(b"start: \xff")
    with pytest.raises(InvalidParameter, match="is not UTF-8"):
        written("--grammar", str(tmp_path / "rules.lark"))
