"""`polydraft train`: the embedded pair, and draft heads for any target."""

from polydraft.cli.train.head import HeadRequest, run_train_head
from polydraft.cli.train.pair import run_train_pair

__all__ = ["HeadRequest", "run_train_head", "run_train_pair"]
