"""Conversations as tokens: by the tokenizer's own template, with its markers once, and refused in one sentence."""

from typing import Any

import pytest
from chatml import CHATML, chat_tokenizer
from transformers import PreTrainedTokenizerFast

from polydraft.errors import InvalidParameter
from polydraft.models import Message, check_shown, conversation_ids
from polydraft.training.token_files import train_tokenizer

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


USER = {"role": "user", "content": " How many? "}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
KNOWN = (
    "{% if tools %}{% for tool in tools %}{% if tool.type == 'function' %}{{ tool.function.name }}{% endif %}"
    "{% endfor %}{% endif %}{% for m in messages %}{% if m.role == 'system' and loop.first %}{{ m.content }}"
    "{% elif m.role == 'user' %}{% if m.name %}{{ m.name }}: {% endif %}{{ m.content | trim }}"
    "{% elif m.role == 'assistant' %}{% if m.reasoning_content and loop.last %}{{ m.reasoning_content }}{% endif %}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endif %}{% endfor %}"
)
SHOWN: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None, str | None]] = [
    (CHATML, [USER], None, None),
    (CHATML, [{"role": "system", "content": "x"}, USER, {"role": "assistant", "content": "3"}], None, None),
    (CHATML, [{"role": "developer", "content": "x"}, USER], [], None),
    (CHATML, [USER], [TOOL], "tools"),
    (CHATML, [USER], [{"type": "other"}], "tools"),
    (CHATML, [{**USER, "name": "Ann"}], None, "messages.0.name"),
    (CHATML, [USER, CALL, {"role": "tool", "content": "4"}], None, "messages.1.tool_calls"),
    (CHATML, [USER, {"role": "assistant", "content": "3", "reasoning_content": "r"}, USER], None, "reasoning_content"),
    (KNOWN, [{**USER, "name": "Ann"}], [TOOL], None),
    (KNOWN, [USER], [TOOL, {**TOOL, "type": "custom"}], "tools"),
    (KNOWN, [USER, CALL, USER], None, None),
    (KNOWN, [USER, {**CALL, "content": "I look."}, USER], None, "messages.1.content"),
    (KNOWN, [USER, CALL, {"role": "tool", "content": "4", "tool_call_id": "1"}], None, "role 'tool'"),
    (KNOWN, [{"role": "developer", "content": "x"}, USER], None, "role 'developer'"),
    (KNOWN, [USER, {"role": "system", "content": "x"}, USER], None, "messages.1.content"),
    (KNOWN, [USER, {"role": "assistant", "content": "<think>r</think>3"}, USER], None, None),
    (KNOWN, [USER, {"role": "assistant", "content": "3", "reasoning_content": "r"}, USER], None, None),
    (KNOWN, [USER, {"role": "assistant", "content": " ", "name": ""}, USER], None, None),
    (
        "{% if messages[0].content == 'x' %}{{ 'x' }}{% else %}{{ raise_exception('no') }}{% endif %}",
        [{"role": "user", "content": "x"}],
        None,
        None,
    ),
]


@pytest.mark.parametrize(("template", "messages", "tools", "lost"), SHOWN, ids=range(len(SHOWN)))
def test_what_a_template_leaves_out_is_refused(
    template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, lost: str | None
) -> None:
    tokenizer, before = chat_tokenizer(template), repr((messages, tools))
    conversation_ids(tokenizer, messages, tools)
    if lost is None:
        check_shown(tokenizer, messages, tools)
    else:
        with pytest.raises(InvalidParameter, match=r"chat template (takes no|leaves out)") as found:
            check_shown(tokenizer, messages, tools)
        assert lost in str(found.value) and str(found.value).count(".") <= 4
    assert repr((messages, tools)) == before
