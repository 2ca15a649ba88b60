"""Commands that join those of polydraft; its command line is imported first, since it imports these."""

from polydraft import cli

__all__ = ["cli"]
