"""Conversations on the command line: what goes through the chat template, what is refused, and what is kept."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from polydraft import load
from polydraft.bench.prompts import Prompt
from polydraft.bench.prompts.prompt import encode
from polydraft.cli import main
from polydraft.models import Message

Folders = tuple[Path, Path]
Call = Callable[..., int]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') "
    "}}{% endif %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'def ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The tiny pair with a chat template."""
    root = tmp_path_factory.mktemp("chat")
    for folder in folders:
        (root / folder.name).mkdir()
        for file in folder.iterdir():
            (root / folder.name / file.name).write_bytes(file.read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(str(root / folder.name))
    return root / "target", root / "draft"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["polydraft", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def models(folders: Folders) -> list[str]:
    return ["--target", str(folders[0]), "--draft", str(folders[1])]


def lines(path: str) -> dict[Any, dict[str, Any]]:
    return {line["id"]: line for line in map(json.loads, Path(path).read_text().splitlines())}


ROWS = [
    {"id": "turns", "turns": ["add two", "again"]},
    {"id": "two", "messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "def"}]},
    {"id": "system", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "add"}]},
    {"id": "plain", "prompt": "add two"},
]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "rows.jsonl"


def text_after(folders: Folders, prompt: Prompt, tokens: int) -> str:
    """Return the greedy text, by Hugging Face's own loop."""
    pair = load(*folders)
    ids = encode(pair, prompt)
    written: Any = pair.target.generate(ids, max_new_tokens=tokens, do_sample=False)
    return str(pair.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))


def test_a_prompt_goes_through_the_template_if_asked_to(
    chat: Folders, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "add two", *models(chat), "--max-new-tokens", "6"]
    found: dict[str, str] = {}
    for option in ("--chat-template", "--no-chat-template", ""):
        assert call(*arguments, "--json", *([option] if option else [])) == 0
        result = json.loads(capsys.readouterr().out)
        found[option] = result["text"]
        assert result["settings"].get("chat_template") == {"--chat-template": True, "": None}.get(option, False)
    message = Prompt("", "", "add two", messages=(Message("user", "add two"),))
    assert found["--chat-template"] == text_after(chat, message, 6)
    assert found["--no-chat-template"] == found[""] == text_after(chat, Prompt("", "", "add two"), 6)
    assert call(*arguments, "--chat-template") == 0
    assert capsys.readouterr().out.startswith(f"add two\n\n{found['--chat-template']}")


def test_a_refused_conversation_costs_its_row(
    chat: Folders, call: Call, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--input", rows, "--output", "out.jsonl", *models(chat), "--max-new-tokens", "6"]
    assert call(*arguments) == 1
    assert "refuses the messages: System role not supported." in capsys.readouterr().err
    found = lines("out.jsonl")
    assert found["system"]["error"] == "The tokenizer's chat template refuses the messages: System role not supported"
    assert found["turns"]["messages"] == [{"role": "user", "content": "add two"}] and "prompt" not in found["turns"]
    assert found["plain"]["prompt"] == "add two" and "messages" not in found["plain"]
    turns = Prompt("", "", "add two", messages=(Message("user", "add two"),))
    two = Prompt("", "", "x", messages=(Message("user", "add"), Message("assistant", "def")))
    assert found["turns"]["text"] == text_after(chat, turns, 6) != found["plain"]["text"]
    assert found["two"]["text"] == text_after(chat, two, 6)
    before = Path("out.jsonl").read_bytes()
    assert call(*arguments, "--json") == 1  # the refused row alone is tried again
    assert json.loads(capsys.readouterr().out)["before"] == 3 and Path("out.jsonl").read_bytes() == before
    assert call(*arguments, "--no-chat-template") == 2
    assert "other settings: chat_template is None there and False here" in capsys.readouterr().err


def test_raw_text_of_a_file_of_conversations(
    chat: Folders, call: Call, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--input", rows, "--output", "out.jsonl", "--no-chat-template", "--max-new-tokens", "4"]
    assert call("generate", *files, *models(chat)) == 1
    found = lines("out.jsonl")
    assert found["turns"]["prompt"] == found["plain"]["prompt"] and found["turns"]["text"] == found["plain"]["text"]
    assert "but the messages are of user, assistant" in found["two"]["error"]
    assert found["turns"].get("settings", found["two"].get("settings"))["chat_template"] is False
    assert "line 3: --no-chat-template makes raw text of one user's message" in capsys.readouterr().err


def test_without_a_template_messages_are_refused(
    folders: Folders, call: Call, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "This model's tokenizer has no chat template, so it cannot take messages: take a chat model, or give raw text "
    )
    assert call("generate", "x", *models(folders), "--chat-template") == 2
    assert capsys.readouterr().err.startswith(f"polydraft: {said}")
    assert call("generate", "--input", rows, "--output", "out.jsonl", *models(folders), "--max-new-tokens", "4") == 1
    capsys.readouterr()
    assert [name for name, line in lines("out.jsonl").items() if "text" in line] == ["plain"]
    (tmp_path / "talk.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]))
    assert call("generate", "--input", "talk.jsonl", "--output", "none.jsonl", *models(folders)) == 2
    assert f"talk.jsonl, line 1: {said}" in (shown := capsys.readouterr().err) and "None of the 2 rows" in shown
    assert not Path("none.jsonl").exists()
    for command in (("bench",), ("limits",), ("tune",)):
        assert call(*command, "--prompts", "talk.jsonl", *models(folders)) == 2
        assert f"polydraft: The prompt '1' of talk: {said}".replace("'1'", "'turns'") in capsys.readouterr().err


QUICK = ["--max-new-tokens", "3", "--temperature", "0", "--arm", "default", "--limit", "1"]


def test_bench_shows_spec_bench_by_kind(chat: Folders, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mini.jsonl").write_text(
        "".join(
            json.dumps({"question_id": f"{name} {number}", "category": name, "turns": ["add"]}) + "\n"
            for name in (
                "writing roleplay reasoning math coding extraction stem humanities translation summarization "
                "qa math_reasoning rag"
            ).split()
            for number in range(2)
        )
    )
    out = ["--prompts", "mini.jsonl", "--out", "runs.jsonl"]
    assert call("bench", *out, *QUICK, *models(chat)) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("Speed-up by task (tokens per target call)") :].splitlines()
    kinds = [line.split()[0] for line in table if line.startswith("  ") and line.strip()]
    assert kinds == ["mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag", "all"]
    assert call("bench", *out, *QUICK, *models(chat), "--no-chat-template") == 2
    assert "chat_template is None there and False here" in capsys.readouterr().err


def test_a_template_for_excerpts_alone_is_refused(
    chat: Folders, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tale.txt").write_text("Once upon a time.\n")
    for command in ("bench", "limits", "tune"):
        assert call(command, "--prompts", "tale.txt", "--chat-template", *models(chat)) == 2
        assert "--chat-template is for prompts, and all that are given are excerpts" in capsys.readouterr().err


def test_spec_bench_that_was_not_fetched(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", "--prompts", "spec-bench") == 2
    assert "run `polydraft fetch spec-bench` once" in capsys.readouterr().err
