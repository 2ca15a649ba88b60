"""Tree rules: which path of a token tree to keep, one rule per file."""

__all__ = []
