"""The engine: the decode loop, its parameters and statistics, and the public calls."""

from polydraft.engine.choices import as_drafter, default_drafter, text_word
from polydraft.engine.compare import Comparison, compare
from polydraft.engine.emission import Block, Emission, Statistics, summed
from polydraft.engine.generate import generate, stream
from polydraft.engine.load import draft_for, head_for, load, load_models
from polydraft.engine.loop.batch import Batch, Method
from polydraft.engine.loop.step import Prompts
from polydraft.engine.many import Completed, ManyRun, Request, RunningBatch, RunningStep, generate_many
from polydraft.engine.output import GenerationOutput, Past
from polydraft.engine.run import Observer, Run
from polydraft.engine.target_law import Ending, TargetLaw
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
