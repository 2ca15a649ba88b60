"""A conversation keeps the very tokens that the model read and wrote, and adds what the template adds."""

from typing import Any

import pytest
import torch
from chatml import CHATML, END, chat_model, chat_tokenizer
from tokenizers import pre_tokenizers

import polydraft
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import Conversation, Message, asked_within, check_template, conversation_ids

CHAT = chat_tokenizer()
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
FORGETTING = CHATML.replace(
    "message['content'] +",
    "(message['content'] if loop.last or message['role'] == 'user' else message['content'].split('/')[-1]) +",
)
ALTERNATING = "{% for message in messages %}{% if message['role'] == 'system' %}" + (
    "{{ raise_exception('System role not supported') }}{% endif %}{{ message['content'] }}{% endfor %}"
)


def rendered(messages: tuple[Message, ...], **how: Any) -> str:
    told = [{"role": one.role, "content": one.content} for one in messages]
    return str(CHAT.apply_chat_template(told, tokenize=False, **how))


def text_of(ids: tuple[int, ...]) -> str:
    return CHAT.decode(list(ids), skip_special_tokens=False)


def answer(tokens: list[int]) -> str:
    return CHAT.decode(tokens, skip_special_tokens=True)


def test_the_first_message_is_what_the_template_makes_of_it() -> None:
    asked = Conversation().asked(CHAT, "How many?")
    assert asked.messages == (Message("user", "How many?"),) and asked.exchanges == 1
    assert list(asked.ids) == conversation_ids(CHAT, asked.messages)
    with_system = Conversation((Message("system", "Be short."),)).asked(CHAT, "How many?")
    assert text_of(with_system.ids).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHow many?")


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_model_sees_exactly_what_it_wrote_and_reads_only_the_new_turn(temperature: int) -> None:
    model, conversation, past = chat_model(CHAT), Conversation(), None
    strange = 0
    for turn, message in enumerate(["How many?", "And then?", "Say 点."]):
        asked = conversation.asked(CHAT, message)
        if turn:
            assert asked.ids[: len(conversation.ids)] == conversation.ids
        ids = torch.tensor([asked.ids])
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        options: dict[str, Any] = {"temperature": temperature, "seed": turn, "max_new_tokens": 12, "drafter": "ngram"}
        run = polydraft.stream(model, prompt, past=past, keep_past=True, **options).exhaust()
        fresh = polydraft.stream(model, prompt, **options).exhaust()
        assert run.new_tokens == fresh.new_tokens
        assert run.statistics.prompt_known == (len(conversation.ids) - (turn > 0))
        written, past = run.new_tokens[0], run.past
        conversation = asked.answered(answer(written), written, ended=run.finish[0] == "eos")
        assert list(conversation.ids[len(asked.ids) :]) == written
        strange += CHAT(answer(written), add_special_tokens=False)["input_ids"] != written
    assert strange > 0, "the tokenizer would have written the same, so that this shows nothing"
    assert text_of(conversation.ids).count("<|im_start|>assistant") == 3


def test_the_text_of_the_tokens_is_the_templates() -> None:
    first = Conversation().asked(CHAT, "How many?")
    written = CHAT("Three, I think.")["input_ids"]
    second = first.answered("Three, I think.", written, ended=False).asked(CHAT, "Sure?\n")
    assert text_of(second.ids) == rendered(second.messages, add_generation_prompt=True)
    assert list(second.ids) == [*first.ids, *written, *second.ids[len(first.ids) + len(written) :]]


def test_what_ends_a_turn_is_written_once() -> None:
    end = CHAT.convert_tokens_to_ids(END)
    first = Conversation().asked(CHAT, "How many?")
    written = [*CHAT("Three.")["input_ids"], end]
    ended = first.answered("Three.", written, ended=True).asked(CHAT, "Sure?")
    cut = first.answered("Three.", written[:-1], ended=False).asked(CHAT, "Sure?")
    assert ended == cut
    assert list(ended.ids[: len(first.ids) + len(written)]) == [*first.ids, *written]
    assert text_of(ended.ids).count(END) == 4


def test_an_empty_answer_is_an_answer() -> None:
    first = Conversation().asked(CHAT, "How many?")
    second = first.answered("", [], ended=False).asked(CHAT, "Well?")
    assert text_of(second.ids) == rendered(second.messages, add_generation_prompt=True)


def test_where_a_template_changes_what_was_said_the_whole_is_made_anew() -> None:
    chat = chat_tokenizer(FORGETTING)
    first = Conversation().asked(chat, "How many?")
    second = first.answered("I think/Three.", [5, 6, 7], ended=False).asked(chat, "Sure?")
    assert list(second.ids) == conversation_ids(chat, second.messages)
    assert "Three." in chat.decode(list(second.ids)) and "think" not in chat.decode(list(second.ids))


def test_spaces_that_a_template_trims_stay_where_the_model_wrote_them() -> None:
    chat = chat_tokenizer(TRIMMING)
    first = Conversation().asked(chat, "How many? ")
    written = chat(" Three. ")["input_ids"]
    second = first.answered(" Three. ", written, ended=False).asked(chat, "Sure?")
    assert list(second.ids[: len(first.ids) + len(written)]) == [*first.ids, *written]
    assert text_of(second.ids).endswith(
        " Three. <|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_an_empty_answer_that_a_template_trims_is_what_the_template_makes_of_it(blank: str) -> None:
    chat = chat_tokenizer(TRIMMING)
    first = Conversation().asked(chat, "How many?")
    second = first.answered(blank, chat(blank)["input_ids"], ended=False).asked(chat, "Sure?")
    assert list(second.ids) == conversation_ids(chat, second.messages)


def test_a_tokenizer_that_puts_a_space_before_all_texts_gives_the_templates_tokens() -> None:
    chat = chat_tokenizer("{% for message in messages %}{{ message['content'] + ';;' }}{% endfor %}")
    chat.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert text_of(chat("one")["input_ids"]) == " one"
    asked = Conversation().asked(chat, "How many?")
    for answer, question in (("Three.", "Sure?"), ("Yes.", "Why?")):
        written = chat.encode("a" + answer)[len(chat.encode("a")) :]
        asked = asked.answered(answer, written, ended=False).asked(chat, question)
    assert text_of(asked.ids) == " How many?;;Three.;;Sure?;;Yes.;;Why?;;"


def long_talk(exchanges: int, system: bool = True) -> Conversation:
    conversation = Conversation((Message("system", "Be short."),) if system else ())
    for number in range(exchanges):
        conversation = conversation.asked(CHAT, f"How many are {number}?")
        conversation = conversation.answered("Three.", CHAT("Three.")["input_ids"], ended=False)
    return conversation


@pytest.mark.parametrize("system", [True, False])
def test_the_oldest_exchanges_make_room_and_the_system_message_stays(system: bool) -> None:
    talk = long_talk(6, system)
    whole = len(talk.asked(CHAT, "And now?").ids)
    asked, dropped = asked_within(talk, CHAT, "And now?", whole + 10, 10)
    assert dropped == 0 and asked == talk.asked(CHAT, "And now?")
    asked, dropped = asked_within(talk, CHAT, "And now?", whole + 9, 10)
    assert dropped > 0 and asked.exchanges == 7 - dropped
    assert len(asked.ids) <= (whole + 9) * 3 / 4 - 10 + 1
    assert [one.role for one in asked.messages[:2]] == (["system", "user"] if system else ["user", "assistant"])
    assert asked.messages[1 if system else 0].content == f"How many are {dropped}?"
    assert list(asked.ids) == conversation_ids(CHAT, asked.messages)


def test_a_message_that_leaves_less_room_than_wished_is_asked_alone() -> None:
    alone = len(Conversation().asked(CHAT, "And now?").ids)
    asked, dropped = asked_within(long_talk(3, system=False), CHAT, "And now?", alone + 1, 50)
    assert dropped == 3 and len(asked.ids) == alone


def test_a_message_that_does_not_fit_is_refused() -> None:
    alone = len(Conversation().asked(CHAT, "And now?").ids)
    said = rf"^The message makes {alone} tokens, but the model's context holds {alone} with the answer: send a shorter"
    with pytest.raises(ContextOverflow, match=said):
        asked_within(long_talk(3, system=False), CHAT, "And now?", alone, 1)


def test_templates_that_cannot_be_used_are_refused_at_once() -> None:
    check_template(CHAT)
    check_template(CHAT, "Be short.")
    with pytest.raises(InvalidParameter, match="has no chat template: take a chat model, such as smollm2"):
        check_template(chat_tokenizer(None))
    check_template(chat_tokenizer(ALTERNATING))
    with pytest.raises(InvalidParameter, match="System role not supported"):
        check_template(chat_tokenizer(ALTERNATING), "Be short.")
    silent = chat_tokenizer("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")
    check_template(silent)
    with pytest.raises(InvalidParameter, match="leaves system messages out"):
        check_template(silent, "Be short.")
