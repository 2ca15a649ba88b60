"""The conversation at a terminal: lines that are typed, commands, and answers as they come."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from polydraft.cli.chat.messages import COMMANDS, ELSE, FENCE, message_of, parsed, read_message, whole_message
from polydraft.cli.chat.session import Chat, attempted, dropping, speak, summary, table
from polydraft.cli.printing import named_values
from polydraft.cli.process import noted_interruption
from polydraft.errors import InvalidParameter
from polydraft.options.value_checks import has_half_character

PROMPT, MORE = "> ", "... "
Read = Callable[[str], str]
"""Shows a prompt and returns a line; EOFError means Ctrl-D."""


class Terminal:
    """A conversation with somebody who types; `notes` has all but the answers, and only Ctrl-D and /exit end it."""

    def __init__(self, chat: Chat, console: Console, notes: Console, read: Read, *, quiet: bool = False) -> None:
        self.chat = chat
        self.console = console
        self.notes = notes
        self.read = read
        self.quiet = quiet
        self.left = self.interrupted = False

    def run(self) -> None:
        """Take turns until somebody leaves."""
        while not self.left:
            try:
                self._round()
            except KeyboardInterrupt:
                self.interrupted = True  # no more than this: it may come again at once
            except EOFError:
                self.left = True
                self.notes.print()

    def _round(self) -> None:
        if self.interrupted:
            self.interrupted = False
            self.notes.print()
            self._said("Ctrl-D leaves.")
        self._said(attempted(self._turn))

    def _turn(self) -> None:
        line = self._line(PROMPT)
        if not line.strip():
            return
        command = parsed(line)
        if command is not None:
            self._do(*command)
        elif line.startswith(FENCE):
            self.answer(whole_message(line, lambda: self._line(MORE)))
        else:
            self.answer(message_of(line))

    def answer(self, message: str) -> None:
        """Send a message and show the answer, and keep both."""
        if not message.strip():
            raise InvalidParameter("The message is empty: write something.")
        answer = self.chat.ask(message)
        self._said(dropping(answer, self.chat.context))
        speak(self.console, answer)
        with noted_interruption():  # who presses Ctrl-C twice does not lose what was written
            kept = self.chat.keep(answer)
            if not kept:
                self._said("Nothing was written, so the message is not kept.")
            elif not self.quiet:
                self._said(summary(answer))

    def _do(self, name: str, rest: str) -> None:
        if name == "reset":
            self.chat.restart(self.chat.system)
            self._said("The conversation is forgotten.")
        elif name == "system":
            self.chat.restart(rest)
            self._said("The system message is set, and the conversation begins anew.")
        elif name == "file":
            self.answer(read_message(rest))
        elif name == "stats":
            self.notes.print(table(self.chat))
        elif name == "help":
            self.notes.print(_help())
        else:
            self.left = True

    def _line(self, prompt: str) -> str:
        try:
            line = self.read(prompt)
        except UnicodeDecodeError as error:
            raise InvalidParameter("The line is not UTF-8: type it again.") from error
        if has_half_character(line):
            raise InvalidParameter("The line is not UTF-8: type it again.")
        return line

    def _said(self, sentence: str) -> None:
        if sentence:
            self.notes.print(sentence, style="dim", soft_wrap=True)


def typed(prompt: str) -> str:
    """Read a line from the keyboard, which can be edited; the prompt never goes into a file."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def with_editing() -> None:
    """Let lines be edited and fetched back, where Python has that."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)


def _help() -> Table:
    found = named_values()
    for command in COMMANDS.values():
        found.add_row(command.usage, command.does)
    for what, does in ELSE.items():
        found.add_row(what, does)
    return found
