"""The worker: the process that owns the model."""

from polydraft.server.worker.answer_text import by_depth
from polydraft.server.worker.asks import Ask, Cancel, Event, GrammarRequest, Speculation, Spell
from polydraft.server.worker.processes import WARNED, ProcessWorker
from polydraft.server.worker.threads import ThreadWorker

__all__ = [
    "WARNED",
    "Ask",
    "Cancel",
    "Event",
    "GrammarRequest",
    "ProcessWorker",
    "Speculation",
    "Spell",
    "ThreadWorker",
    "by_depth",
]
