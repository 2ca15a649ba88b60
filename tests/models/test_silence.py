"""What others say while models are loaded is held back, and logging, warnings and bars are afterwards as before."""

import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging

from polydraft.errors import CheckpointError
from polydraft.models.checkpoints.silence import held_back

NAMES = ("transformers", "huggingface_hub")


class Ears(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@pytest.fixture
def ears() -> Iterator[Ears]:
    own = Ears()
    for name in NAMES:
        logging.getLogger(name).addHandler(own)
    yield own
    for name in NAMES:
        logging.getLogger(name).removeHandler(own)


def state() -> list[object]:
    loggers = [logging.getLogger(name) for name in NAMES]
    settings = [(list(one.handlers), one.propagate, one.level, one.disabled) for one in loggers]
    bars = (
        transformers_logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
        are_progress_bars_disabled("a"),
    )
    return [settings, bars, list(warnings.filters), warnings.showwarning]


def speak() -> None:
    logging.getLogger("transformers.modeling_utils").warning("a table")
    logging.getLogger("huggingface_hub.utils").error("a retry")
    warnings.warn("an old option", FutureWarning, stacklevel=1)
    assert not transformers_logging.is_progress_bar_enabled() and are_progress_bars_disabled()


def test_after_an_error_nothing_is_said(ears: Ears) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError), held_back():
            speak()
            raise CheckpointError("damaged.")
    assert not ears.heard and not said


def test_what_was_held_back_is_said_when_all_went_well(ears: Ears) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with held_back():
            speak()
            assert not ears.heard
    assert ears.heard == ["a table", "a retry"]
    assert [str(one.message) for one in said] == ["an old option"]


@pytest.mark.parametrize("error", [CheckpointError, KeyboardInterrupt])
@pytest.mark.parametrize("bars", [True, False])
def test_the_process_is_as_before(error: type[BaseException], bars: bool, ears: Ears) -> None:
    shown = transformers_logging.is_progress_bar_enabled()
    (transformers_logging.enable_progress_bar if bars else transformers_logging.disable_progress_bar)()
    (disable_progress_bars if bars else enable_progress_bars)("a")
    logging.getLogger(NAMES[0]).propagate = True
    try:
        before = state()
        with held_back():
            pass
        assert state() == before
        with pytest.raises(error), held_back():
            raise error
        assert state() == before
    finally:
        logging.getLogger(NAMES[0]).propagate = False
        (transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar)()


def test_threads_do_not_mix_up_each_others_state() -> None:
    before = state()

    def load(number: int) -> None:
        for _ in range(50):
            with held_back():
                logging.getLogger("transformers").debug(str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))
    assert state() == before
