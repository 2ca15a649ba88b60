"""`polydraft chat` with files, pipes and JSON, and what is refused; the terminal has a file of its own."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import START
from transformers import AutoTokenizer

from polydraft.cli import main
from polydraft.cli.chat import command, session
from polydraft.models import Conversation, conversation_ids


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Call = Callable[..., Ended]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chat_folder: Path
) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str, piped: bytes = b"", target: str | None = str(chat_folder)) -> Ended:
        named = [] if target is None else ["--target", target]
        monkeypatch.setattr(sys, "argv", ["polydraft", "chat", *named, *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_:
            main()
        shown = capsys.readouterr()
        return Ended(int(exit_.value.code or 0), shown.out, shown.err)

    return run


SHORT = ("--max-new-tokens", "6")
TWO = b"How many?\n\nAnd then?\n"


def test_a_pipe_gives_the_answers_and_nothing_else(call: Call) -> None:
    ended = call(*SHORT, piped=TWO)
    told = call(*SHORT, "--json", piped=TWO).rows
    assert ended.code == 0 and ended.err == ""
    assert ended.out == "".join(row["content"] + "\n" for row in told) and len(told) == 2


def test_json_tells_what_was_read_and_what_was_known(call: Call, chat_folder: Path) -> None:
    first, second = call(*SHORT, "--json", piped=TWO).rows
    chat = AutoTokenizer.from_pretrained(str(chat_folder))
    asked = Conversation().asked(chat, "How many?")
    assert [*first] == [
        *("role", "content", "finish", "tokens", "accepted", "target_calls", "prompt_read", "prompt_known"),
        *("dropped", "verifier", "lossless", "seconds"),
    ]
    assert (first["role"], first["finish"], first["tokens"]) == ("assistant", "length", 6)
    assert (first["prompt_read"], first["prompt_known"]) == (len(asked.ids), 0)
    assert second["prompt_known"] == len(asked.ids) + 5
    assert second["prompt_read"] < len(asked.ids)
    assert first["dropped"] == 0 and first["seconds"] > 0


@pytest.mark.long(2)
@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("drafting", [["ngram"], ["none"], ["model"], ["lookup-first"], ["model", "--tree", "2,1"]])
def test_every_drafter_answers_and_the_seed_fixes_the_conversation(
    call: Call, chat_folder: Path, drafting: Sequence[str], temperature: str
) -> None:
    model = ["--draft", str(chat_folder)] if drafting[0] in ("model", "lookup-first") else []
    options = [*SHORT, "--json", "--drafter", *drafting, *model, "--temperature", temperature, "--seed", "3"]
    first, again = (call(*options, piped=TWO) for _ in range(2))
    assert first.code == 0
    texts = [row["content"] for row in first.rows]
    assert texts == [row["content"] for row in again.rows]
    assert all(row["prompt_known"] for row in first.rows[1:])
    if temperature == "0":
        assert texts == [row["content"] for row in call(*SHORT, "--json", "--drafter", "none", piped=TWO).rows]
    else:
        assert texts != [row["content"] for row in call(*options[:-1], "4", piped=TWO).rows]


def test_a_conversation_without_a_seed_is_another_every_time(call: Call) -> None:
    one, other = (call(*SHORT, "--temperature", "1", piped=TWO) for _ in range(2))
    assert one.out != other.out


def test_the_seed_of_a_turn_follows_that_of_the_turn_before(call: Call) -> None:
    hot = [*SHORT, "--json", "--temperature", "1", "--drafter", "none"]
    same = call(*hot, "--seed", "7", piped=b"How many?\nHow many?\n").rows
    assert same[0]["content"] == call(*hot, "--seed", "7", piped=b"How many?\n").rows[0]["content"]
    assert call(*hot, "--seed", str(2**63 - 1), piped=TWO).code == 0


def test_files_of_messages(call: Call) -> None:
    Path("plain.txt").write_text("How many?\n\n  \nAnd then?\r\n")
    Path("rows.jsonl").write_text('"How many?"\n\n{"role": "user", "content": "And then?"}\n')
    piped = call(*SHORT, piped=TWO)
    assert call(*SHORT, "--input", "plain.txt", piped=b"Not read.\n") == piped
    assert call(*SHORT, "--input", "rows.jsonl") == piped


def test_commands_are_messages_outside_a_terminal(call: Call, chat_folder: Path) -> None:
    rows = call(*SHORT, "--json", piped=b"/reset\n//x\n/exit\n").rows
    chat = AutoTokenizer.from_pretrained(str(chat_folder))
    assert len(rows) == 3
    assert rows[0]["prompt_read"] == len(Conversation().asked(chat, "/reset").ids)


def test_a_system_message(call: Call, chat_folder: Path) -> None:
    chat = AutoTokenizer.from_pretrained(str(chat_folder))
    (row,) = call(*SHORT, "--json", "--system", "Be short.", piped=b"How many?\n").rows
    told = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How many?"}]
    assert row["prompt_read"] == len(chat.apply_chat_template(told, add_generation_prompt=True, return_dict=False))


def test_no_message_is_no_answer(call: Call) -> None:
    assert call(piped=b"") == call("--json", piped=b"\n \n") == Ended(0, "", "")


def test_an_answer_goes_into_a_pipe_byte_for_byte_and_is_visible_in_json(call: Call, chat_folder: Path) -> None:
    hot = ["--temperature", "2", "--seed", "1", "--max-new-tokens", "200"]
    ended = call(*hot, piped=b"How many?\n")
    (row,) = call(*hot, "--json", piped=b"How many?\n").rows
    assert ended.out == row["content"] + "\n" and START not in ended.out
    assert any(ord(letter) < 32 for letter in row["content"].replace("\n", "")), "nothing that would have to be escaped"


def test_the_oldest_exchanges_make_room(call: Call, small_chat_folder: Path) -> None:
    small = str(small_chat_folder)
    rows = call(*SHORT, "--json", piped=b"How many are there?\n" * 8, target=small).rows
    assert {row["finish"] for row in rows} == {"length"}
    assert rows[0]["dropped"] == 0 and sum(row["dropped"] for row in rows) >= 5
    assert all(row["prompt_read"] + row["prompt_known"] + 6 <= 128 for row in rows)
    ended = call(*SHORT, piped=b"How many are there?\n" * 6, target=small)
    assert "polydraft: The context of 128 tokens is full: the " in ended.err and ended.err.endswith("dropped.\n")


def test_a_message_that_is_too_long_costs_its_turn(call: Call, small_chat_folder: Path) -> None:
    small = str(small_chat_folder)
    piped = b"How many?\n" + b"x" * 200 + b"\nAnd then?\n"
    ended = call(*SHORT, "--json", piped=piped, target=small)
    assert ended.code == 1 and [row["finish"] for row in ended.rows] == ["length", "refused", "length"]
    assert ended.rows[1]["error"].startswith("The message makes 2") and ended.rows[2]["prompt_known"] > 0
    ended = call(*SHORT, piped=piped, target=small)
    assert ended.code == 1 and ended.err.startswith("polydraft: The message makes 2") and ended.err.count("\n") == 1


def test_an_answer_is_cut_by_the_context(call: Call, small_chat_folder: Path) -> None:
    small = str(small_chat_folder)
    (row,) = call("--json", piped=b"How many?\n", target=small).rows
    assert row["finish"] == "context" and row["tokens"] + row["prompt_read"] == 128


def test_errors_in_the_middle_cost_a_turn(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception | None] = [
        *(None, torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), None),
        *(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), ZeroDivisionError("what"), None),
    ]
    original = session.stream

    def failing(*arguments: Any, **options: Any) -> Any:
        if (error := errors.pop(0)) is not None:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(session, "stream", failing)
    ended = call(*SHORT, "--json", piped=b"How many?\n" * 7)
    assert ended.code == 1
    assert [row["finish"] for row in ended.rows] == [
        *("length", "refused", "refused", "length", "refused", "refused", "length")
    ]
    said = [row["error"] for row in ended.rows if row["finish"] == "refused"]
    assert all("memory did not suffice for this turn" in one for one in said[:3])
    assert said[3].startswith("Unexpected error, please report (POLYDRAFT_DEBUG=1 shows more): ZeroDivisionError: what")
    known = [row["prompt_known"] for row in ended.rows if row["finish"] == "length"]
    assert known == sorted(known) and known[1] > 0


def test_what_is_written_while_it_loads_is_given_up_and_changes_no_answer(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, warm_up = [], command.warm_up

    def seen(run: Any) -> None:
        warm_up(run)
        runs.append(run)

    monkeypatch.setattr(command, "warm_up", seen)
    arguments = (*SHORT, "--json", "--temperature", "1", "--seed", "3")
    told = call(*arguments, piped=TWO).rows
    (run,) = runs
    assert run.new_tokens[0] and not run.over and run.statistics.drafted
    monkeypatch.setattr(command, "rehearse", lambda *_: None)
    assert [row["content"] for row in call(*arguments, piped=TWO).rows] == [row["content"] for row in told]


def test_ctrl_c_in_a_pipe_ends_it_with_what_was_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    original = session.Answer.__iter__

    def interrupted(self: session.Answer) -> Any:
        for number, gained in enumerate(original(self)):
            if number == 2:
                raise KeyboardInterrupt
            yield gained

    monkeypatch.setattr(session.Answer, "__iter__", interrupted)
    ended = call("--json", "--drafter", "none", piped=TWO)
    assert ended.code == 130
    (row,) = ended.rows
    assert row["finish"] == "interrupted" and row["tokens"] == 3


def test_ctrl_c_as_the_last_words_are_printed_ends_it_too(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    original = session.write_text

    def interrupting(console: Any, text: str, style: str) -> None:
        original(console, text, style)
        monkeypatch.setattr(session, "write_text", original)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(session, "write_text", interrupting)
    ended = call("--json", "--drafter", "none", "--max-new-tokens", "1", piped=TWO)
    assert ended.code == 130
    (row,) = ended.rows
    assert row["finish"] == "length" and row["tokens"] == 1


BAD: dict[str, tuple[Sequence[str], bytes, str]] = {
    "both outputs": (["--json", "--quiet"], b"", "--json and --quiet each print one thing"),
    "an idle filter": (["--top-p", "0.5"], b"", "At temperature 0"),
    "an empty system message": (["--system", " "], b"", '--system "" says nothing'),
    "a drafter without a model": (["--drafter", "model"], b"", "--drafter model needs a draft model"),
    "drafts that there are not": (["--drafter", "none", "--tree", "2"], b"", "--drafter none drafts nothing"),
    "a bad tree": (["--tree", "x"], b"", "x"),
    "no file": (["--input", "nowhere.txt"], b"", "there is no such file"),
    "an empty file": (["--input", "empty.txt"], b"", "empty.txt: the file has no message in it"),
    "no JSON": (["--input", "bad.jsonl"], b"", "bad.jsonl, line 2: not JSON"),
    "a number": (["--input", "number.jsonl"], b"", "line 1: the row is neither a text nor an object with content"),
    "a null": (["--input", "null.jsonl"], b"", "line 1: the row is neither a text nor an object with content"),
    "another role": (["--input", "role.jsonl"], b"", "line 1: the role is 'assistant', but only the user's"),
    "another field": (["--input", "field.jsonl"], b"", "line 1: 'prompt' is not known"),
    "blank content": (["--input", "blank.jsonl"], b"", "line 1: the message is empty"),
    "half a pair": (["--input", "half.jsonl"], b"", "line 1: the message has half of a surrogate pair"),
    "bytes": ([], b"caf\xe9\n", "Standard input, line 1: the text is not UTF-8"),
    "a long line": ([], b"x" * (2**20 + 1), "Standard input, line 1: the line has more than 1048576 bytes"),
    "no such model": (["--target", "./nowhere"], b"", "There is no model folder './nowhere'"),
}
FILES = {
    "empty.txt": " \n\n",
    "bad.jsonl": '"fine"\n{\n',
    "number.jsonl": "5\n",
    "null.jsonl": '{"role": "user"}\n',
    "role.jsonl": '{"role": "assistant", "content": "x"}\n',
    "field.jsonl": '{"prompt": "x"}\n',
    "blank.jsonl": '" "\n',
    "half.jsonl": '"\\ud800"\n',
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_is_one_sentence(case: str, call: Call, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    arguments, piped, said = BAD[case]
    ended = call(*arguments, piped=piped)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("polydraft: ") and ended.err.count("\n") == 1 and said in ended.err


def test_models_that_are_no_chat_models_are_refused(call: Call, folders: tuple[Path, Path]) -> None:
    ended = call(piped=TWO, target=str(folders[0]))
    assert ended.code == 2 and ended.out == ""
    assert ended.err == (
        "polydraft: This model's tokenizer has no chat template: take a chat model, such as smollm2.\n"
    )


def test_the_default_is_fetched_first(call: Call) -> None:
    ended = call(piped=TWO, target=None)
    assert ended.code == 2 and "`polydraft fetch smollm2` brings it" in ended.err


def test_the_first_prompt_is_what_a_template_makes(call: Call, chat_folder: Path) -> None:
    chat = AutoTokenizer.from_pretrained(str(chat_folder))
    asked = Conversation().asked(chat, "How many?")
    assert list(asked.ids) == conversation_ids(chat, asked.messages)
