"""Logs: a JSON object a line, without the text of prompts unless that is asked for."""

import json
import logging
import re
import sys
import time
import uuid
from typing import Any

from polydraft.server.worker import traced

LOG = logging.getLogger("polydraft.server")
MOST_ID = 128


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = getattr(record, "told", {})
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        head = {"time": when, "level": record.levelname.lower(), "event": record.getMessage().strip()}
        if record.name != LOG.name:
            head["logger"] = record.name
        if record.exc_info and record.exc_info[1] is not None:
            head["traceback"] = traced(record.exc_info[1])
        return json.dumps({**head, **told}, ensure_ascii=True, default=str)


def write_logs() -> None:
    """Send logs to standard error: the server's own, and the warnings and errors of everything that it runs on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for one in (LOG, logging.getLogger()):
        one.handlers[:] = [handler]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def log(event: str, *, level: int = logging.INFO, **told: Any) -> None:
    """Write a line."""
    LOG.log(level, event, extra={"told": {name: value for name, value in told.items() if value is not None}})


def request_id(given: str | None) -> str:
    """Return the id that a client gave its request, without what has no place in a log or header; a new one if none."""
    cleaned = re.sub(r"[^A-Za-z0-9._:/+=@-]", "", given or "")[:MOST_ID]
    return cleaned or uuid.uuid4().hex
