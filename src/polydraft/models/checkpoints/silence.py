"""What transformers, torch and the hub say while they load: held back, or told as one sentence if it fails."""

import logging
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pickle import UnpicklingError

from huggingface_hub.utils.tqdm import progress_bar_states
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

ENDS = re.compile(r"(?<=[\w)'\"`\]])\. ")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
UNSAFE = re.compile(r"GLOBAL ([\w.]+)")
NO_TOKENIZER = "Couldn't instantiate the backend tokenizer"
NO_MEMORY = ("can't allocate memory", "out of memory")


def reason(error: BaseException) -> str:
    """Return why something could not be loaded, as the rest of a sentence without its full stop."""
    text = COLOURS.sub("", str(error))
    pickled = [one for one in _chain(error) if isinstance(one, UnpicklingError)]
    refused = next((one for one in pickled if "Weights only load failed" in str(one)), None)
    if refused is not None:
        found = UNSAFE.search(str(refused))
        what = f" ({found[1]})" if found else ""
        return (
            f"its pytorch_model.bin or a part of it holds more than numbers{what}, and may run any code when it is "
            "read; convert the weights to safetensors if you trust who made them"
        )
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in NO_MEMORY):
        return "there is not enough memory for its weights"
    said = first_sentence(error)
    if NO_TOKENIZER in said:
        return "its files are not those of a tokenizer; tokenizer.json is missing or damaged"
    if isinstance(error, LookupError | EOFError | UnpicklingError):  # these tell what the reader tripped over
        return f"a file in it is damaged ({type(error).__name__}: {said})"
    return said


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error, without its full stop; a line that ends with a colon goes on."""
    text = COLOURS.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    taken = lines[:1]
    while taken and taken[-1].endswith(":") and len(taken) < len(lines):
        taken.append(lines[len(taken)])
    return ENDS.split(" ".join(taken))[0].rstrip(". :") or f"no reason is given ({type(error).__name__})"


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and those that it came from."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


TALKERS = ("transformers", "huggingface_hub")
BAR = "tqdm"
ONE_AT_A_TIME = threading.RLock()
"""Loggers and warnings belong to the whole process, so that models are loaded one after another."""


class _Kept(logging.Handler):
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back log lines, warnings and progress bars, and let lines and warnings out at the end if all went well.

    After an error they are dropped: its one sentence says what was wrong. Handlers, levels, filters and bars are what
    they were before in either case.
    """
    with ONE_AT_A_TIME:
        kept = _Kept()
        with warnings.catch_warnings(record=True) as said, _without_bars(), _instead_of_handlers(kept):
            yield
        for record in kept.records:
            logging.getLogger(record.name).handle(record)
        for one in said:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)


@contextmanager
def _instead_of_handlers(kept: _Kept) -> Iterator[None]:
    """Send what the loggers of both libraries are told to one handler."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    before = [(list(one.handlers), one.propagate) for one in loggers]
    try:
        for one in loggers:
            one.handlers, one.propagate = [kept], False
        yield
    finally:
        for one, (handlers, propagate) in zip(loggers, before, strict=True):
            one.handlers, one.propagate = handlers, propagate


@contextmanager
def _without_bars() -> Iterator[None]:
    """Show no progress bars; both libraries have a state of their own, and transformers sets the hub's as well.

    The bar of the reader of GGUF files obeys neither.
    """
    shown, states = transformers_logging.is_progress_bar_enabled(), dict(progress_bar_states)
    bar = getattr(modeling_gguf_pytorch_utils, BAR, None)
    try:
        _show_bars(False)
        if bar is not None:
            setattr(modeling_gguf_pytorch_utils, BAR, partial(bar, disable=True))
        yield
    finally:
        if bar is not None:
            setattr(modeling_gguf_pytorch_utils, BAR, bar)
        _show_bars(shown)
        progress_bar_states.clear()
        progress_bar_states.update(states)


def _show_bars(shown: bool) -> None:
    """Switch bars; where the environment has fixed them, the hub would warn that they cannot be switched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar)()
