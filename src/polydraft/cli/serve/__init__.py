"""`polydraft serve`: an OpenAI-compatible server."""

from polydraft.cli.serve.commands import serve

__all__ = ["serve"]
