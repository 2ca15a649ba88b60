"""Between tokens and text: conversations through a chat template, and text as it comes."""

from polydraft.models.text.conversation import Message, conversation_ids
from polydraft.models.text.stream_decoder import StreamDecoder, text_of

__all__ = ["Message", "StreamDecoder", "conversation_ids", "text_of"]
