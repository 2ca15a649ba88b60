"""`polydraft chat` for somebody who types: commands, Ctrl-C and Ctrl-D, in this process and through a real terminal."""

import io
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import polydraft
from polydraft.cli.chat.messages import COMMANDS, MOST_BYTES, message_of, parsed, whole_message
from polydraft.cli.chat.session import Answer, Chat
from polydraft.cli.chat.terminal import Terminal
from polydraft.cli.printing import console
from polydraft.errors import InvalidParameter
from polydraft.models import Pair

COLOURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def pair(chat_folder: Path) -> Pair:
    return polydraft.load(chat_folder)


@pytest.fixture(scope="module")
def small(small_chat_folder: Path) -> Pair:
    return polydraft.load(small_chat_folder)


def chat_of(pair: Pair, **options: Any) -> Chat:
    told: dict[str, Any] = {"drafter": polydraft.NgramDrafter(), "temperature": 0, "max_new_tokens": 6, **options}
    return Chat(pair, told, seed=1)


class Typing:
    """Lines that are typed one after the other; an error is raised in place of a line, and Ctrl-D comes at the end."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = [*lines]
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line


def typed(chat: Chat, *lines: str | BaseException, quiet: bool = False) -> tuple[str, str]:
    """Hold a conversation; return what was answered, and what was said beside it."""
    shown, said = console(width=200), console(width=200)
    shown.file, said.file = io.StringIO(), io.StringIO()
    terminal = Terminal(chat, shown, said, Typing(*lines), quiet=quiet)
    terminal.run()
    return shown.file.getvalue(), said.file.getvalue()


def told_of(chat: Chat) -> list[str]:
    return [one.content for one in chat.conversation.messages if one.role == "user"]


def test_a_turn_is_answered_and_summed_up(pair: Pair) -> None:
    chat = chat_of(pair)
    answers, said = typed(chat, "How many?", "", "  ", "And then?")
    assert told_of(chat) == ["How many?", "And then?"]
    spoken = [one.content for one in chat.conversation.messages if one.role == "assistant"]
    assert answers == "".join(one + "\n" for one in spoken)
    first, second = said.strip().splitlines()
    line = r"6 tokens, [\d.]+ tokens/s, [\d.]+ tokens per call, read {} of {} prompt tokens, cut by --max-new-tokens"
    assert re.fullmatch(line.format(r"(\d+)", r"\1"), first)
    found = re.fullmatch(line.format(r"(\d+)", r"(\d+)"), second)
    assert found and int(found[1]) < int(found[2]) == chat.told[1].prompt_read + chat.told[1].prompt_known


def test_no_control_character_of_an_answer_reaches_a_terminal(pair: Pair) -> None:
    chat = chat_of(pair, temperature=2.0, top_k=0, max_new_tokens=200)
    shown = console(width=200)
    shown.file, shown._force_terminal = io.StringIO(), True
    Terminal(chat, shown, console(quiet=True), Typing("How many?")).run()
    content = chat.conversation.messages[-1].content
    assert steering(content) and not steering(shown.file.getvalue())


def test_quiet_says_only_what_goes_wrong(pair: Pair) -> None:
    chat = chat_of(pair)
    answers, said = typed(chat, "How many?", "/nonsense", quiet=True)
    assert (
        answers and said == "There is no command /nonsense: /help lists them, and // sends text that begins with /.\n\n"
    )


def test_reset_forgets_what_was_said_and_known(pair: Pair) -> None:
    chat = chat_of(pair)
    _, said = typed(chat, "How many?", "/reset", "How many?")
    assert "The conversation is forgotten." in said
    assert told_of(chat) == ["How many?"] and chat.told[0].prompt_known == 0
    typed(chat, "/reset")
    assert chat.past is None and chat.conversation.ids == ()


def test_a_system_message_begins_anew_and_lasts(pair: Pair) -> None:
    chat = chat_of(pair)
    _, said = typed(chat, "How many?", "/system  Be short. ", "And then?", "/reset", "So?")
    assert "The system message is set, and the conversation begins anew." in said
    assert [(one.role, one.content) for one in chat.conversation.messages[:2]] == [
        ("system", "Be short."),
        ("user", "So?"),
    ]


def test_a_system_message_that_the_template_refuses_changes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(pair)
    typed(chat, "How many?")
    before = chat.conversation
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + str(
        pair.tokenizer.chat_template
    )
    monkeypatch.setattr(pair.tokenizer, "chat_template", refusing)
    _, said = typed(chat, "/system Be short.")
    assert "The tokenizer's chat template refuses the messages: no system." in said
    assert chat.conversation is before and chat.system is None


def test_the_table_of_the_conversation(pair: Pair) -> None:
    chat = chat_of(pair)
    assert re.search(r"answers +0 ", typed(chat, "/stats")[1])
    _, said = typed(chat, "How many?", "And then?", "/stats")
    told = chat.statistics
    assert re.search(r"answers +2 ", said)
    assert f"{told.prompt_read} read, {told.prompt_known} known from before" in said
    assert f"{len(chat.conversation.ids)} of 4096 tokens" in said
    assert re.search(r"new tokens +12 ", said)


def test_a_file_is_a_message(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("How\nmany?\n")
    chat = chat_of(pair)
    typed(chat, f"/file {tmp_path / 'a b.txt'}")
    assert told_of(chat) == ["How\nmany?\n"]


def test_files_that_are_no_message_cost_nothing(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "bytes").write_bytes(b"caf\xe9")
    (tmp_path / "large").write_bytes(b"x" * (MOST_BYTES + 1))
    os.mkfifo(tmp_path / "fifo")
    expected = {
        "nowhere": "the file cannot be read: No such file or directory.",
        "empty": "there is no text in the file.",
        "bytes": "the text is not UTF-8: unexpected end of data.",
        "large": "the file has more than 1 MiB; send a part of it.",
        "fifo": "the file cannot be read: it is a pipe, not a regular file.",
        ".": "the file cannot be read: it is a folder, not a regular file.",
        "x" * 300: "the file cannot be read: File name too long.",
    }
    chat = chat_of(pair)
    for name, sentence in expected.items():
        _, said = typed(chat, f"/file {tmp_path}/{name}")
        assert said.strip() == f"{tmp_path}/{name}: {sentence}"
    assert typed(chat, "/file ~nosuchuser/x")[1].startswith("~nosuchuser/x: the file cannot be read")
    assert typed(chat, "/file a\0b")[1].startswith("a\\x00b: the file cannot be read")
    assert not chat.told


def test_a_message_of_several_lines(pair: Pair) -> None:
    chat = chat_of(pair)
    typed(chat, '"""How', "", "/reset", 'many?"""', '"""', "one", '"""', '"""in one"""')
    assert told_of(chat) == ["How\n\n/reset\nmany?", "one", "in one"]
    assert "The message is empty: write something." in typed(chat, '""" ', '"""')[1]


def test_ctrl_c_at_the_prompt_says_how_to_leave(pair: Pair) -> None:
    chat = chat_of(pair)
    answers, said = typed(chat, KeyboardInterrupt(), '"""How', KeyboardInterrupt(), "many?")
    assert said.count("Ctrl-D leaves.") == 2
    assert told_of(chat) == ["many?"] and answers


@contextmanager
def ctrl_c(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """Press Ctrl-C after so many steps of the next answer."""
    original = Answer.__iter__

    def interrupted(self: Answer) -> Any:
        for number, gained in enumerate(original(self)):
            if number == after:
                raise KeyboardInterrupt
            yield gained
        if after < 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "__iter__", interrupted)
        yield


def test_ctrl_c_ends_an_answer_and_keeps_what_was_written(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(pair, drafter=polydraft.NoDraft(), max_new_tokens=50)
    with ctrl_c(monkeypatch, 3):
        answers, said = typed(chat, "How many?")
    assert said.strip().endswith(", interrupted") and chat.told[0].new_tokens == 4
    assert answers == chat.conversation.messages[-1].content + "\n"
    _, said = typed(chat, "And then?")
    assert told_of(chat) == ["How many?", "And then?"]
    assert chat.told[1].prompt_known == len(chat.told) - 2 + chat.told[0].prompt_read + 3


class Pressing(io.StringIO):
    """A screen on which Ctrl-C is pressed while something is written."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_ctrl_c_while_something_is_written_loses_and_repeats_nothing(pair: Pair, after: int) -> None:
    chat = chat_of(pair, max_new_tokens=60)
    shown, said = console(width=200), console(width=200)
    shown.file, said.file = Pressing(after), io.StringIO()
    Terminal(chat, shown, said, Typing("How many?")).run()
    assert said.file.getvalue().strip().endswith(", interrupted")
    assert shown.file.getvalue() == chat.conversation.messages[-1].content + "\n"


def test_ctrl_c_before_anything_was_written_keeps_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(pair)
    typed(chat, "How many?")
    before, past = chat.conversation, chat.past

    def nothing(_: Answer) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "__iter__", nothing)
        _, said = typed(chat, "And then?")
    assert said.strip() == "Nothing was written, so the message is not kept."
    assert chat.conversation is before and chat.past is past


def test_ctrl_c_between_turns_does_not_end_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(pair)

    def torn(_: Answer) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat, "keep", torn)
        _, said = typed(chat, "How many?", "/stats")
    assert "Ctrl-D leaves." in said and re.search("answers +0", said)


def test_lines_that_are_no_text_are_refused(pair: Pair) -> None:
    chat = chat_of(pair)
    _, said = typed(chat, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "caf\udce9")
    assert said.count("The line is not UTF-8: type it again.") == 2 and not chat.told


def test_exit_leaves(pair: Pair) -> None:
    chat = chat_of(pair)
    typed(chat, "/exit", "How many?")
    assert not chat.told


def test_help_lists_every_command(pair: Pair) -> None:
    _, said = typed(chat_of(pair), "/help")
    assert all(f"/{name}" in said for name in COMMANDS) and '"""' in said and "//TEXT" in said


def test_text_that_begins_with_a_slash(pair: Pair) -> None:
    chat = chat_of(pair)
    typed(chat, "//reset", "//", "///x")
    assert told_of(chat) == ["/reset", "/", "//x"]


@pytest.mark.filterwarnings("ignore:A text was cut short")
def test_dropped_exchanges_and_messages_that_do_not_fit_are_said(small: Pair) -> None:
    chat = chat_of(small)
    _, said = typed(chat, *["How many are there?"] * 6, "x" * 200, "So?", "/stats")
    assert re.search(
        r"The context of 128 tokens is full: the (oldest exchange was|\d oldest exchanges were) dropped\.", said
    )
    assert re.search(r"The message makes \d+ tokens, but the model's context holds 128", said)
    assert told_of(chat)[-1] == "So?" and re.search(r"exchanges dropped +\d", said)
    chat = chat_of(small, max_new_tokens=500)
    assert "cut by the model's context" in typed(chat, "How many?")[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("/reset", ("reset", "")), ("/file  a b ", ("file", "a b")), ("//x", None), ("x", None), (" /x", None)],
)
def test_commands_are_told_from_messages(line: str, expected: object) -> None:
    assert parsed(line) == expected


@pytest.mark.parametrize("line", ["/", "/x", "/reset now", "/system", "/file  ", "/stats 1", "/RESET"])
def test_commands_that_there_are_not(line: str) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        parsed(line)
    assert str(refusal.value).endswith(".") and str(refusal.value).count(". ") == 0


def test_the_parts_of_messages() -> None:
    more = iter(["b", 'c"""'])
    assert whole_message('"""a', lambda: next(more)) == "a\nb\nc"
    assert message_of("//a") == "/a" and message_of("a//") == "a//"


class Screen:
    """A process behind a terminal of its own."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        start = "from polydraft_command import main; main()"
        self.child, self.end = pty.fork()
        if self.child == 0:  # pragma: no cover
            os.chdir(cwd)
            os.environ.update(TERM="xterm", COLUMNS="200", OMP_NUM_THREADS="1")
            os.execv(sys.executable, [sys.executable, "-c", start, *arguments])
        self.raw, self.at = "", 0

    @property
    def seen(self) -> str:
        """All that was shown, without colours and carriage returns."""
        return COLOURS.sub("", self.raw).replace("\r", "")

    def until(self, what: str, seconds: float = 120.0) -> str:
        """Wait for a text; return what came since the last one that was waited for, up to this one's end."""
        late = time.monotonic() + seconds
        while (place := self.seen.find(what, self.at)) < 0:
            assert time.monotonic() < late, f"no {what!r} in {self.seen[self.at :]!r}"
            self._read()
        before, self.at = self.seen[self.at : place + len(what)], place + len(what)
        return before

    def until_more(self, count: int) -> None:
        """Wait for so many letters more."""
        late = time.monotonic() + 120
        while len(self.seen) < self.at + count:
            assert time.monotonic() < late, f"not {count} letters in {self.seen[self.at :]!r}"
            self._read()

    def press(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def press_until(self, keys: str, what: str) -> None:
        """Press keys until a text comes: a signal that finds Python busy with a key waits for the next one."""
        for _ in range(12):
            self.press(keys)
            late = time.monotonic() + 10
            while time.monotonic() < late:
                self._read()
                if what in self.seen[self.at :]:
                    return
        raise AssertionError(f"no {what!r} in {self.seen[self.at :]!r}")

    def code(self) -> int:
        """Wait for the end; return the exit code."""
        try:
            while True:
                self._read(60)
        except OSError:  # nobody is left at the other end
            return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])

    def close(self) -> None:
        try:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self.end)

    def _read(self, seconds: float = 0.2) -> None:
        if select.select([self.end], [], [], seconds)[0]:
            self.raw += os.read(self.end, 65536).decode(errors="replace")


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    begun: list[Screen] = []

    def begin(*arguments: str) -> Screen:
        begun.append(Screen(*arguments, cwd=tmp_path))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def steering(text: str, allowed: Sequence[str] = ("\n", "\r", "\t", "\b")) -> list[str]:
    """Return the control characters of a text, colours and what line editing needs left out."""
    return [letter for letter in COLOURS.sub("", text) if ord(letter) < 32 and letter not in allowed]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_session_at_a_terminal(screen: Callable[..., Screen], chat_folder: Path) -> None:
    chat = screen("chat", "--target", str(chat_folder), "--max-new-tokens", "3000")
    greeting = chat.until("\n> ")
    assert (
        str(chat_folder) in greeting and "drafter: merge (ngram" in greeting and "/help shows the commands" in greeting
    )
    chat.press("How many?\n")
    chat.until("many?\n")
    chat.until_more(300)
    chat.press("\x03")
    assert ", interrupted" in chat.until("\n> ")
    assert "\x1b[1m" in chat.raw and "\x1b[32m" in chat.raw, "the target's own tokens are bold, drafts are green"
    chat.press("half a line")
    chat.until("half a line")
    chat.press_until("\x03", "Ctrl-D leaves.")
    chat.press("/stats\n")
    assert re.search(r"answers +1 ", chat.until("from before"))
    chat.press("\x1b[A\x01/no\x05\n")  # the line before, with something at its beginning
    chat.until("There is no command /no/stats")
    chat.until("\n> ")
    chat.press("\x04")
    assert chat.code() == 0
    assert not steering(chat.seen) and "Traceback" not in chat.seen
