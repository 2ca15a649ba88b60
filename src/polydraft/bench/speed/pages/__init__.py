"""What a benchmark's reader sees: tables, figures and a Markdown page."""

from polydraft.bench.speed.pages.figures import draw_speed_figures
from polydraft.bench.speed.pages.page import equality_in_words, lossy_arms, verdicts, write_report
from polydraft.bench.speed.pages.speed_tables import bound_table, difference_table, kind_table, speed_table

__all__ = [
    "bound_table",
    "difference_table",
    "draw_speed_figures",
    "equality_in_words",
    "kind_table",
    "lossy_arms",
    "speed_table",
    "verdicts",
    "write_report",
]
