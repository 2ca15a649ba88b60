"""One turn on the screen: the answer as it comes, what is said about it, and what goes wrong as one sentence."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from polydraft.cli.chat.session import Answer, Chat
from polydraft.cli.generation.interruption import noted_interruption
from polydraft.cli.one_text import DRAFTED, OWN, write_text
from polydraft.cli.printing.summaries import add_statistics
from polydraft.cli.process import DEBUG
from polydraft.errors import PolydraftError
from polydraft.models import StreamDecoder

CUTS = {
    "length": "cut by --max-new-tokens",
    "context": "cut by the model's context",
    "interrupted": "interrupted",
}
"""Why an answer is not whole."""


def counted(count: int, word: str) -> str:
    """Return a number of things in words."""
    return f"{count} {word}{'s' * (count != 1)}"


def summary(answer: Answer) -> str:
    """Return the line below an answer."""
    found = answer.statistics
    prompt = found.prompt_read + found.prompt_known
    parts = [
        counted(found.new_tokens, "token"),
        f"{found.tokens_per_second:.1f} tokens/s",
        f"{found.block_efficiency:.2f} tokens per call",
        f"read {found.prompt_read} of {counted(prompt, 'prompt token')}",
    ]
    parts += [] if found.lossless else [f"LOSSY ({found.verifier})"]
    cut = CUTS.get(answer.finish)
    return ", ".join([*parts, cut] if cut else parts)


def dropping(answer: Answer, context: int) -> str:
    """Return the sentence that says what was dropped; empty if nothing was."""
    if not answer.dropped:
        return ""
    were = "oldest exchange was" if answer.dropped == 1 else f"{answer.dropped} oldest exchanges were"
    return f"The context of {context} tokens is full: the {were} dropped."


def table(chat: Chat) -> Table:
    """Return the table of the conversation so far."""
    told = chat.statistics
    found = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    found.add_row("answers", str(len(chat.told)))
    if chat.dropped:
        found.add_row("exchanges dropped", str(chat.dropped))
    found.add_row("conversation", f"{len(chat.conversation.ids)} of {chat.context} tokens")
    found.add_row("prompt tokens", f"{told.prompt_read} read, {told.prompt_known} known from before")
    if chat.told:
        add_statistics(found, told)
    if not told.lossless:
        found.add_row("law", f"NOT the target's: {told.verifier} is lossy")
    if told.fallback:
        found.add_row("drafter failed", told.fallback, style="red")
    return found


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer for JSON."""
    found = answer.statistics
    return {
        "role": "assistant",
        "content": answer.content,
        "finish": answer.finish,
        "tokens": found.new_tokens,
        "accepted": found.accepted,
        "target_calls": found.target_calls,
        "prompt_read": found.prompt_read,
        "prompt_known": found.prompt_known,
        "dropped": answer.dropped,
        "verifier": found.verifier,
        "lossless": found.lossless,
        "seconds": round(found.seconds.get("total", 0.0), 4),
    }


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
