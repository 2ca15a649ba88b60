"""`polydraft chat`: a conversation with a model, in the terminal, from a file or through a pipe."""

from polydraft.cli.chat.command import ChatRequest, run_chat

__all__ = ["ChatRequest", "run_chat"]
