"""Between tokens and text: conversations through a chat template."""

from polydraft.models.text.conversation import Message, conversation_ids

__all__ = ["Message", "conversation_ids"]
