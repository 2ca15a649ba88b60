"""`polydraft bench` with its subjects, and `polydraft report`: options, what is shown, and the report's page."""

from polydraft.cli.benchmark.subjects import bench_app

__all__ = ["bench_app"]
