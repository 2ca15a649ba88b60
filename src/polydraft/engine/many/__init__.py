"""Many texts through one running batch: the call, the run, and the prompts."""

from polydraft.engine.many.asked import Completed
from polydraft.engine.many.many_run import ManyRun, generate_many
from polydraft.engine.many.running import Request, RunningBatch, RunningStep

__all__ = ["Completed", "ManyRun", "Request", "RunningBatch", "RunningStep", "generate_many"]
