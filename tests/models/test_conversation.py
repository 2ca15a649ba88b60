"""Conversations as tokens: by the tokenizer's own template, with its markers once, and refused in one sentence."""

import pytest
from transformers import PreTrainedTokenizerFast

from polydraft.errors import InvalidParameter
from polydraft.models import Message, conversation_ids
from polydraft.training.windows import train_tokenizer

CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    made = train_tokenizer(["user: Hi.\nassistant: Well, well.\n"] * 20, vocab_size=300, context=64)
    made.chat_template = template
    return made


def test_the_template_writes_the_markers_and_nothing_is_added() -> None:
    chat = tokenizer(CHAT)
    ids = conversation_ids(chat, [Message("user", "Hi.")])
    assert chat.decode(ids) == f"{chat.bos_token}user:Hi.\nassistant:" and ids.count(chat.bos_token_id) == 1
    assert ids == chat.apply_chat_template(
        [{"role": "user", "content": "Hi."}], add_generation_prompt=True, return_dict=False
    )


def test_the_assistants_own_last_message_is_continued() -> None:
    chat = tokenizer(CHAT)
    ids = conversation_ids(chat, [Message("user", "Hi."), Message("assistant", "Well,")])
    assert chat.decode(ids, skip_special_tokens=True) == "user:Hi.\nassistant:Well,"


def test_what_cannot_be_put_into_a_template_is_refused() -> None:
    with pytest.raises(
        InvalidParameter, match=r"has no chat template, so it cannot take messages: .*--no-chat-template"
    ):
        conversation_ids(tokenizer(None), [Message("user", "Hi.")])
    two = [Message("user", "Hi."), Message("user", "Hi?")]
    said = r"^The tokenizer's chat template refuses the messages: Conversation roles must alternate user/assistant"
    with pytest.raises(InvalidParameter, match=said):
        conversation_ids(tokenizer(ALTERNATING), two)
    with pytest.raises(InvalidParameter, match=r"refuses the messages: .+\.$"):
        conversation_ids(tokenizer("{% if %}"), two)
    with pytest.raises(InvalidParameter, match="makes no tokens"):
        conversation_ids(tokenizer("{{ '' }}"), two)
