"""Selection: which draft a rule takes. Averaged over the drafts, each token is taken with a given probability."""

__all__ = []
