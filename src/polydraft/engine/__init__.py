"""The engine: the decode loop, its parameters and statistics, and the public calls."""

from polydraft.engine.calls.compare import Comparison, compare
from polydraft.engine.calls.load import draft_for, head_for, load, load_models
from polydraft.engine.calls.output import GenerationOutput
from polydraft.engine.calls.past import Past
from polydraft.engine.defaults import as_drafter, default_drafter, text_word
from polydraft.engine.emission import Block, Emission, Statistics, summed
from polydraft.engine.generate import generate, stream
from polydraft.engine.loop.batch import Batch, Method
from polydraft.engine.loop.prefill import Prompts
from polydraft.engine.many import Completed, ManyRun, Request, RunningBatch, RunningStep, generate_many
from polydraft.engine.observer import Observer
from polydraft.engine.run import Run
from polydraft.engine.stopping import Ending
from polydraft.engine.target_law import TargetLaw
from polydraft.engine.tuning import Effort, planned, tune
from polydraft.planning import Goodput, Planner

__all__ = [
    "Batch",
    "Block",
    "Comparison",
    "Completed",
    "Effort",
    "Emission",
    "Ending",
    "GenerationOutput",
    "Goodput",
    "ManyRun",
    "Method",
    "Observer",
    "Past",
    "Planner",
    "Prompts",
    "Request",
    "Run",
    "RunningBatch",
    "RunningStep",
    "Statistics",
    "TargetLaw",
    "as_drafter",
    "compare",
    "default_drafter",
    "draft_for",
    "generate",
    "generate_many",
    "head_for",
    "load",
    "load_models",
    "planned",
    "stream",
    "summed",
    "text_word",
    "tune",
]
