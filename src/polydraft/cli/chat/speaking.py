"""One turn on the screen: the answer as it comes, and what goes wrong as one sentence."""

import os
import traceback
from collections.abc import Callable

import torch
from rich.console import Console

from polydraft.cli.chat.session import Answer
from polydraft.cli.generate import DRAFTED, OWN, write_text
from polydraft.cli.generation.interruption import noted_interruption
from polydraft.cli.process import DEBUG
from polydraft.errors import PolydraftError
from polydraft.models import StreamDecoder


def speak(console: Console, answer: Answer) -> bool:
    """Print an answer as it comes, to its end or to Ctrl-C; all that it has then is printed, and once.

    Returns:
        whether Ctrl-C was pressed, which may be as the last words were printed.
    """
    decoder, shown, left = StreamDecoder(answer.tokenizer), 0, False
    try:
        for gained in answer:
            with noted_interruption() as pressed:  # Ctrl-C ends a pass of the model at once, but no printing
                for place, token in enumerate(gained.tokens):
                    write_text(console, decoder.add(token), DRAFTED if place < gained.accepted else OWN)
                shown += len(gained.tokens)
            left = pressed()
            if left:
                break
    except KeyboardInterrupt:
        left = True
        for token in answer.tokens[shown:]:  # of a step that was complete, but not handed over yet
            write_text(console, decoder.add(token), OWN)
    finally:
        write_text(console, decoder.rest() + "\n", OWN)
        if not console.quiet:
            console.file.flush()
    return left


def attempted(turn: Callable[[], None]) -> str:
    """Take a turn; return what went wrong in a sentence, or nothing. The end of input or output passes through."""
    try:
        turn()
    except PolydraftError as error:
        return str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return _of_memory(error)
    except (OSError, EOFError):  # nobody reads any more, or nobody types
        raise
    except Exception as error:  # noqa: BLE001  it costs the turn, not the conversation
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):  # torch's on a CPU
            return _of_memory(error)
        if os.environ.get(DEBUG):
            traceback.print_exception(error)
        return f"Unexpected error, please report ({DEBUG}=1 shows more): {type(error).__name__}: {error}."
    return ""


def _of_memory(_: BaseException) -> str:
    return "The memory did not suffice for this turn, which is not kept: send a shorter message, or begin anew."
