"""Many texts through one running batch: the call, the run, and the prompts."""

from polydraft.engine.many.asked import Completed
from polydraft.engine.many.call import generate_many
from polydraft.engine.many.open_batch import OpenBatch, OpenStep
from polydraft.engine.many.run import ManyRun

__all__ = ["Completed", "ManyRun", "OpenBatch", "OpenStep", "generate_many"]
