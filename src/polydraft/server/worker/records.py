"""Records that the libraries of the model's process log, for the server's log to write."""

import logging
from collections.abc import Callable


class _Telling(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(self.format(record))
        except Exception:  # noqa: BLE001  as `logging` has it: a record that cannot be written is nobody's error
            self.handleError(record)


def tell_records(tell: Callable[[str], None]) -> None:
    """Hand warnings and errors of all loggers to a function, instead of to the handlers that libraries gave them.

    Args:
        tell: takes a record's logger and text, with its traceback if it has one.
    """
    for one in list(logging.root.manager.loggerDict.values()):
        if isinstance(one, logging.Logger) and one.handlers:
            one.handlers.clear()
            one.propagate = True
    logging.root.handlers[:] = [_Telling(tell)]
