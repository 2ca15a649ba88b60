"""Node rules: which of a node's drafts to keep, one rule per file."""

__all__ = []
