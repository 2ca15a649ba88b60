"""The worker: the process that owns the model."""

from polydraft.server.worker.asks import Ask, CallRequest, Cancel, Event, GrammarRequest, Speculation, Spell, Unlearning
from polydraft.server.worker.workers import WARNED, Hire, ProcessWorker, ThreadWorker, Worker, new_worker, traced

__all__ = [
    "WARNED",
    "Ask",
    "CallRequest",
    "Cancel",
    "Event",
    "GrammarRequest",
    "Hire",
    "ProcessWorker",
    "Speculation",
    "Spell",
    "ThreadWorker",
    "Unlearning",
    "Worker",
    "new_worker",
    "traced",
]
