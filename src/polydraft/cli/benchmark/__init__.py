"""`polydraft bench` and `polydraft report`: how arms are spelt, what is shown of a benchmark, and its page."""

from polydraft.bench.speed import SpeedSettings
from polydraft.cli.benchmark.bench import BenchRequest, run_bench
from polydraft.cli.benchmark.report import run_report

__all__ = ["BenchRequest", "SpeedSettings", "run_bench", "run_report"]
