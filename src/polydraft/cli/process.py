"""The command line as a process: Ctrl-C, exit codes, and one sentence for whatever goes wrong.

Exit codes: 0 done; 1 done, and the finding is bad, or standard output was lost; 2 a bad call; 3 a draft was made and is
no better than what was there before, or none can pay; 70 an error of ours; 130 Ctrl-C; 141 nobody reads standard output
any more.
"""

import _thread
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, cast

import typer

from polydraft.cli.printing import (
    keep_streams_usable,
    loss_of_output,
    on_one_line,
    say_on_one_line,
    turn_to_nowhere,
    warnings_as_sentences,
)
from polydraft.errors import InvalidParameter, PolydraftError
from polydraft.machine_code import COMPILING, told_first
from polydraft.options.value_checks import has_half_character
from polydraft_command import INTERRUPTED, leave, say
from polydraft_command import stopped as say_stopped

FAILED, BAD_CALL, NO_BETTER, OURS, UNREAD = 1, 2, 3, 70, 141
_SAID: list[str] = []
"""What was said to be kept when Ctrl-C was pressed: it is said once."""
DEBUG = "POLYDRAFT_DEBUG"
"""The environment variable that shows where an error of ours happened."""
BadUsage = cast(
    type[typer.BadParameter], next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
)
"""Base of the parser's errors; where it is to be imported from differs between versions of typer."""


def exit_code_of(command: Callable[[], object]) -> int:
    """Run the command line and return its exit code; whatever goes wrong is said on standard error."""
    _SAID.clear()
    try:
        with _interruptible():
            if not keep_streams_usable():
                return _failed("Standard output is closed: send it to a file, or to /dev/null.")
            check_encoding(sys.argv[1:])
            with warnings_as_sentences(always=False), _stores_written(), told_first(lambda: say(COMPILING)):
                code = int(str(command() or 0))
                if code == INTERRUPTED:  # typer makes this of a Ctrl-C that no command caught
                    code = _interrupted()
    except KeyboardInterrupt:
        code = _interrupted()
    except BrokenPipeError:
        code = UNREAD
    except typer.Exit as end:
        code = end.exit_code
    except (PolydraftError, BadUsage) as error:
        code = _said(error)
    except Exception as error:  # noqa: BLE001  the last resort: what comes here is an error of ours
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C in a library that makes another error of it
            code = _interrupted()
        else:
            code = FAILED if isinstance(error, OSError) and loss_of_output() else _confessed(error)
    return _flushed(code)


def _interrupted() -> int:
    return INTERRUPTED if _SAID else stopped()


def stopped(kept: str = "nothing was kept") -> int:
    """Say that Ctrl-C ends the command, what was kept and how to go on; return the exit code."""
    _SAID.append(kept)
    return say_stopped(on_one_line(kept))


@contextmanager
def _stores_written() -> Iterator[None]:
    """Write at the end what drafters keep of texts: when Python itself ends, a warning has no place to go."""
    try:
        yield
    finally:
        if "polydraft.drafters" in sys.modules:  # else there are none, and importing them takes seconds
            from polydraft.drafters import flush_stores

            flush_stores()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt`, whatever it did before, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with _not_lost_in_finalizers():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _not_lost_in_finalizers() -> Iterator[None]:
    """Send Ctrl-C again, a moment later, if it came in a `__del__`: Python prints and drops what is raised there."""
    hook, again = sys.unraisablehook, list[threading.Timer]()

    def send_again(lost: "sys.UnraisableHookArgs") -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            return hook(lost)
        again.append(threading.Timer(0.01, _interrupt))
        again[-1].daemon = True
        again[-1].start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for timer in again:
            timer.cancel()


def _interrupt() -> None:
    """Interrupt the main thread, also while it waits for something, where the system can."""
    to_thread, main = getattr(signal, "pthread_kill", None), threading.main_thread().ident
    if to_thread is None or main is None:
        _thread.interrupt_main()
    else:
        to_thread(main, signal.SIGINT)


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once while a command's modules are imported: an exception could be caught there."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        signal.signal(signal.SIGINT, leave)
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def carried_out_by(place: str) -> Callable[[Any], None]:
    """Return a function that imports another, "module:name", calls it, and leaves with the exit code it returns."""
    module, _, name = place.partition(":")

    def call(options: Any) -> None:
        with importing():
            run = getattr(import_module(module), name)
        raise typer.Exit(run(options))

    return call


def check_encoding(arguments: Sequence[str]) -> None:
    """Check that the arguments are text.

    Raises:
        InvalidParameter: one holds bytes that are not UTF-8.
    """
    for argument in arguments:
        if has_half_character(argument):
            raise InvalidParameter(f"The argument '{argument}' is not UTF-8: give text and file names in UTF-8.")


def _said(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
        return BAD_CALL
    said = error.format_message() if isinstance(error, BadUsage) else str(error)
    if isinstance(error, BadUsage):
        said = " ".join(said.replace(": Value error, ", ": ").split()).removesuffix(".")
        context = getattr(error, "ctx", None)
        said += f"; see `{context.command_path} --help`" if context else ""
    if not said.endswith("."):  # libraries' errors, which ours may quote, end in many ways
        said = f"{said.rstrip(' :')}."
    say_on_one_line(said)
    return BAD_CALL


def _confessed(error: Exception) -> int:
    """Say that it is our fault, unless it came from a user's own file; `POLYDRAFT_DEBUG=1` shows where."""
    from polydraft.catalogue import blamed

    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    place = blamed(error)
    if place:
        say_on_one_line(f"{place} ({DEBUG}=1 shows more).")
        return BAD_CALL
    say_on_one_line(f"unexpected error, please report ({DEBUG}=1 shows more): {type(error).__name__}: {error}")
    return OURS


def _flushed(code: int) -> int:
    """Write what is left of standard output; if that is not possible say so, unless its reader has gone."""
    lost = loss_of_output()
    if lost is None:
        return code
    turn_to_nowhere()
    if code in (UNREAD, INTERRUPTED) or isinstance(lost, BrokenPipeError):
        return INTERRUPTED if code == INTERRUPTED else UNREAD
    return _failed(f"Standard output cannot be written: {lost.strerror}.")


def _failed(sentence: str) -> int:
    say_on_one_line(sentence)
    return FAILED


@contextmanager
def noted_interruption(ending: str = "") -> Iterator[Callable[[], bool]]:
    """Give a function that tells whether Ctrl-C was pressed; pressed again, it interrupts at once.

    Where Ctrl-C is ignored on purpose, as by nohup, it stays so.

    Args:
        ending: what comes to its end first, such as "this step", which is said at once; "" where that takes no time.
    """
    pressed: list[int] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return

    def note(number: int, _: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)
        if ending:
            say(f"Stopping after {ending}; Ctrl-C again stops at once.")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
