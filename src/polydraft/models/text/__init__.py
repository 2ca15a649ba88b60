"""Between tokens and text: conversations through a chat template."""

from polydraft.models.text.conversation import Message, conversation_ids
from polydraft.models.text.turns import Conversation, asked_within, check_template

__all__ = ["Conversation", "Message", "asked_within", "check_template", "conversation_ids"]
