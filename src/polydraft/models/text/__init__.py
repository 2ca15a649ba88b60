"""Between tokens and text: conversations through a chat template, and text as it comes."""

from polydraft.models.text.conversation import Message, check_shown, conversation_ids
from polydraft.models.text.stream_decoder import StreamDecoder, bytes_of, text_of
from polydraft.models.text.turns import Conversation, asked_within, check_template

__all__ = [
    "Conversation",
    "Message",
    "StreamDecoder",
    "asked_within",
    "bytes_of",
    "check_shown",
    "check_template",
    "conversation_ids",
    "text_of",
]
