"""Searching the sub-layers that a target drafts best without."""

from polydraft.engine.skips.skip_search import SKIP_SAMPLERS, CheckedSkips, FoundSkips, SkipSettings, tune_skips

__all__ = ["SKIP_SAMPLERS", "CheckedSkips", "FoundSkips", "SkipSettings", "tune_skips"]
