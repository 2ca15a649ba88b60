"""`align`: a draft made for the user's own target, from measuring to a verdict by the clock."""

from polydraft.bench.aligning.aligned_draft import Alignment, AlignPlan, align, kept_best
from polydraft.bench.aligning.draft_card import curve_lines
from polydraft.bench.aligning.judging import AlignmentVerdict

__all__ = ["AlignPlan", "Alignment", "AlignmentVerdict", "align", "curve_lines", "kept_best"]
