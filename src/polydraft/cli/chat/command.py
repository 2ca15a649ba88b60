"""`polydraft chat`: what the options mean, and which kind of conversation it is."""

import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polydraft.cli.chat.messages import piped_messages, read_messages
from polydraft.cli.chat.session import Chat, as_json, attempted, dropping, speak
from polydraft.cli.chat.terminal import Terminal, typed, with_editing
from polydraft.cli.clashes import idle_filters, refuse_clashes
from polydraft.cli.generation.one_text import (
    check_request,
    drafter_name,
    drafter_of,
    load_pair_of,
    warm_up,
)
from polydraft.cli.printing import console as new_console
from polydraft.cli.printing import notes_beside, print_json_line, say_on_one_line, warnings_as_sentences
from polydraft.cli.process import FAILED, stopped
from polydraft.drafters import Drafter
from polydraft.engine import stream
from polydraft.errors import CUT
from polydraft.options.commands.generate_options import ChatOptions

TARGET = "smollm2"
REHEARSED = (0, 1) * 4
"""A text in which drafters find something."""
WARM_UP_ROOM = 512


def run_chat(call: ChatOptions) -> int:
    """Hold the conversation; return the exit code: 0, 1 if a message of a file could not be answered, 130.

    Raises:
        InvalidParameter: options that do not go together, or a model without a chat template.
        PromptFileError: the file of messages cannot be used.
        CheckpointError: the model cannot be loaded.
    """
    request = replace(call.of_a_text, target=call.target or TARGET)
    drafter = drafter_name(request)
    options = check_request(request, drafter)
    empty = call.system is not None and not call.system.strip()
    notes = notes_beside(call)
    refuse_clashes(
        idle_filters(request.sampling),
        (empty, '--system "" says nothing: leave it out, so that the template\'s own is used.'),
    )
    rows = read_messages(call.input_file) if call.input_file is not None else None
    with notes.status("Loading the models ..."):
        pair = load_pair_of(request)
        options["drafter"] = drafter_of(drafter, pair, request)
        chat = Chat(pair, options, request.seed, call.system)
        rehearse(chat, drafter_of(drafter, pair, request))
    with warnings_as_sentences():
        warnings.filterwarnings("ignore", CUT)  # the line below an answer says so
        if rows is None and not call.as_json and sys.stdin.isatty():
            return _talked(chat, str(request.target), quiet=call.quiet)
        return _answered(chat, piped_messages(sys.stdin.buffer.readline) if rows is None else rows, call)


def rehearse(chat: Chat, drafter: Drafter) -> None:
    """Take the first steps of a text that nobody sees, so that the first answer does not wait for machine code.

    The drafter is one for this alone. The text is given up before it ends.
    """
    ids = torch.tensor([REHEARSED], device=chat.pair.target.device)
    room = min(WARM_UP_ROOM, chat.context - len(REHEARSED))
    options = {**chat.options, "drafter": drafter, "max_new_tokens": room, "min_new_tokens": room, "seed": 0}
    warm_up(stream(chat.pair.target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options))


def _talked(chat: Chat, target: str, *, quiet: bool) -> int:
    console = new_console()
    notes = console if console.is_terminal else new_console(errors=True)
    with_editing()
    if not quiet:
        drafter: Any = chat.options["drafter"]
        notes.print(f"{target}, a context of {chat.context} tokens; drafter: {drafter.name}.", soft_wrap=True)
        notes.print("/help shows the commands, Ctrl-C ends an answer, Ctrl-D leaves.", soft_wrap=True)
    Terminal(chat, console, notes, typed, quiet=quiet).run()
    return 0


def _answered(chat: Chat, messages: Iterable[str], call: ChatOptions) -> int:
    """Answer messages one after the other, with nothing between the answers; what cannot be answered is said."""
    failed = False
    for message in messages:
        left: list[bool] = []
        error = attempted(partial(_answer, chat, message, left, call))
        failed = failed or bool(error)
        if error:
            _refuse(error, call)
        elif left[0]:
            return stopped("the answers so far are printed")
    return FAILED if failed else 0


def _answer(chat: Chat, message: str, left: list[bool], call: ChatOptions) -> None:
    answer = chat.ask(message)
    _note(dropping(answer, chat.context), call)
    left.append(speak(new_console(quiet=call.as_json), answer))
    chat.keep(answer)
    if call.as_json:
        print_json_line(as_json(answer))
        sys.stdout.flush()


def _refuse(error: str, call: ChatOptions) -> None:
    if call.as_json:
        row = {"role": "assistant", "content": "", "finish": "refused", "error": error}
        print_json_line(row)
        sys.stdout.flush()
    else:
        say_on_one_line(error)


def _note(sentence: str, call: ChatOptions) -> None:
    if sentence and not (call.as_json or call.quiet):
        say_on_one_line(sentence)
