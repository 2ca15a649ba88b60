"""The worker: the process that owns the model."""

from polydraft.server.worker.asks import Ask, Cancel, Event, GrammarRequest, Speculation, Spell
from polydraft.server.worker.workers import WARNED, ProcessWorker, ThreadWorker, Worker, new_worker, traced

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
    "Worker",
    "new_worker",
    "traced",
]
