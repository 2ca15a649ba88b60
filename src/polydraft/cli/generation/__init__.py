"""`polydraft generate --input`: a file of prompts through one running batch, into a file of texts."""

from polydraft.cli.generation.batch import run_file
from polydraft.cli.generation.grammars import given_grammar
from polydraft.cli.generation.job import file_job

__all__ = ["file_job", "given_grammar", "run_file"]
