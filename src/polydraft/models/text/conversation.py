"""Conversations as token ids, by the chat template that a tokenizer brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from polydraft.errors import InvalidParameter
from polydraft.models.checkpoints.reasons import first_sentence


@dataclass(frozen=True)
class Message:
    """What one side of a conversation said.

    Args:
        role: who: "system", "user", "assistant", or what else the template knows.
        content: what.
    """

    role: str
    content: str


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the tokens of a conversation, up to where the model's answer begins.

    The template writes all special tokens itself, so none is added. If the last message is the assistant's, the model
    continues that message, as in Hugging Face's pipelines.

    Args:
        tokenizer: the model's.
        messages: what was said; a mapping may have more than a role and a content, for templates that know it.
        tools: what the template is to tell of tools.

    Raises:
        InvalidParameter: there is no template, it refuses the messages, or it makes no tokens of them.
    """
    if not tokenizer.chat_template:
        raise InvalidParameter(
            "This model's tokenizer has no chat template, so it cannot take messages: take a chat model, or give raw "
            "text (--no-chat-template on the command line)."
        )
    told = [dict(one) if isinstance(one, Mapping) else {"role": one.role, "content": one.content} for one in messages]
    continued = bool(told) and told[-1]["role"] == "assistant"
    try:
        ids = tokenizer.apply_chat_template(
            told,
            tools=None if tools is None else list(map(dict, tools)),
            add_generation_prompt=not continued,
            continue_final_message=continued,
            return_dict=False,
            tokenizer_kwargs={"verbose": False},  # whoever asks knows how long a text may be
        )
    except Exception as error:  # the template is a program of the model's maker: whatever it raises is its refusal
        raise InvalidParameter(
            f"The tokenizer's chat template refuses the messages: {first_sentence(error)}."
        ) from error
    if not ids:
        raise InvalidParameter("The tokenizer's chat template makes no tokens of the messages: is it the right one?")
    return [int(token) for token in cast(Sequence[Any], ids)]
