"""What a call is given and what it returns, as users have it."""

__all__ = []
