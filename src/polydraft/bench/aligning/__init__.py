"""`align`: a draft made for the user's own target, from measuring to a verdict by the clock."""

from polydraft.bench.aligning.align_plan import Alignment, AlignPlan
from polydraft.bench.aligning.aligned_draft import align, kept_best, run_alignment
from polydraft.bench.aligning.draft_card import curve_lines
from polydraft.bench.aligning.judging import AlignmentVerdict

__all__ = ["AlignPlan", "Alignment", "AlignmentVerdict", "align", "curve_lines", "kept_best", "run_alignment"]
