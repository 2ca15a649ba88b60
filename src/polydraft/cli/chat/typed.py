"""What may be typed in place of a message."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polydraft.errors import InvalidParameter


@dataclass(frozen=True)
class Command:
    """A command.

    Args:
        usage: how it is typed.
        does: what it does, for help.
        takes: whether something follows its name.
    """

    usage: str
    does: str
    takes: bool = False


COMMANDS: Mapping[str, Command] = {
    "reset": Command("/reset", "forget the conversation"),
    "system": Command("/system TEXT", "set the system message, and begin anew", takes=True),
    "file": Command("/file PATH", "send the text of a file", takes=True),
    "stats": Command("/stats", "show counts and times of the conversation"),
    "help": Command("/help", "show this"),
    "exit": Command("/exit", "leave, as Ctrl-D does"),
}
ELSE: Mapping[str, str] = {
    '"""': "begin a message of several lines, and end it",
    "//TEXT": "send text that begins with a slash",
    "Ctrl-C": "end the answer; what was written stays",
}
"""What else help tells."""
FENCE = '"""'


def parsed(line: str) -> tuple[str, str] | None:
    """Return the name of a command and what follows it; None if the line is a message.

    Raises:
        InvalidParameter: there is no such command, or it takes more or less than what follows.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line[1:].strip().partition(" ")
    rest = rest.strip()
    if name not in COMMANDS:
        raise InvalidParameter(f"There is no command /{name}: /help lists them, and // sends text that begins with /.")
    command = COMMANDS[name]
    if rest and not command.takes:
        raise InvalidParameter(f"/{name} takes nothing: type it alone.")
    if command.takes and not rest:
        raise InvalidParameter(f"/{name} needs something after it: {command.usage}.")
    return name, rest


def message_of(line: str) -> str:
    """Return the message that a line is: // at its beginning means /."""
    return line[1:] if line.startswith("//") else line


def whole_message(first: str, more: Callable[[], str]) -> str:
    """Return a message of several lines, given its first, which begins with three quotation marks.

    Args:
        first: the line that opens it; what follows the marks belongs to the message.
        more: returns the next line.
    """
    lines = [first.removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(more())
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")
