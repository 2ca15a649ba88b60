"""Selection: which draft to take so that every token is taken with a given probability, averaged over the drafts."""

__all__ = []
