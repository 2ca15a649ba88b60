"""Formats in which models write calls of tools and reasoning, as data, and which one a chat template speaks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from polydraft.errors import InvalidParameter, shown
from polydraft.models.text.marks import Thinking

Kind = Literal["json", "header", "tagged", "python", "harmony"]
"""How a call is written: an object with a name and arguments; a name, then an object; a name, then tagged arguments; a
call as in Python; a name in a message's header, then an object."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes its calls.

    The canonical text of calls is

        begin  call_begin head CALL call_end  (between call_begin head CALL call_end)*  end

    and `CALL` begins with the function's name. Readers take other blanks where this has some.

    Args:
        name: the word of `--tool-format`.
        kind: how a call is written.
        mark: what tells that a call begins; the canonical text begins with it.
        begin: before the first call; a blank before the bracket at its end may be missing, and of objects the list.
        call_begin: before every call.
        head: the beginning of a call that all of them share.
        infix: of kind "header" and "harmony", what stands between name and arguments.
        call_end: behind every call.
        between: between two calls.
        end: behind the last call.
        key: of kind "json", the name of the arguments.
        anchored: whether the mark counts at the beginning of an answer alone.
        counted: whether a name is followed by a colon and the call's number.
        aside: of kind "header", what may stand behind a name with an id behind it, which is not told.
        name_end: of kind "tagged", what ends the function's name; with `key_begin`, `key_end` and `value_end` around
            the arguments.
        signs: what a chat template has that speaks the format: all of one line of these.
        framing: special tokens beside those in the texts above that readers have to see.
        id_form: what ids of calls look like: "call", "short" (nine letters and digits) or "counted".
    """

    name: str
    kind: Kind
    mark: str
    begin: str = ""
    call_begin: str = ""
    head: str = ""
    infix: str = ""
    call_end: str = ""
    between: str = ""
    end: str = ""
    key: str = "arguments"
    anchored: bool = False
    counted: bool = False
    aside: str = ""
    name_end: str = ""
    key_begin: str = ""
    key_end: str = ""
    value_end: str = ""
    signs: tuple[tuple[str, ...], ...] = ()
    framing: tuple[str, ...] = ()
    id_form: Literal["call", "short", "counted"] = "call"

    @property
    def lead(self) -> str:
        """What a section of calls begins with, up to the first name."""
        return self.begin + self.call_begin + self.head

    @property
    def next_lead(self) -> str:
        """What stands between the end of a call and the name of the next one."""
        return self.between + self.call_begin + self.head

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that readers have to see, also where they are special tokens."""
        return self.lead, self.aside, self.infix, self.call_end, self.next_lead, self.end, *self.framing


def _deepseek(words: str) -> str:
    """Return a special token of DeepSeek's, which has wide bars, and low blocks for blanks."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


HEAD = '{"name": "'
FORMATS = (
    ToolFormat(
        "harmony",
        "harmony",
        "<|channel|>commentary to=functions.",
        head="<|channel|>commentary to=functions.",
        infix=" <|constrain|>json<|message|>",
        signs=(("<|channel|>", "<|message|>"),),
        framing=("<|start|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    ToolFormat(
        "kimi",
        "header",
        "<|tool_calls_section_begin|>",
        begin="<|tool_calls_section_begin|>",
        call_begin="<|tool_call_begin|>",
        head="functions.",
        infix="<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        counted=True,
        signs=(("<|tool_calls_section_begin|>",),),
        id_form="counted",
    ),
    ToolFormat(
        "deepseek",
        "header",
        _deepseek("tool calls begin"),
        begin=_deepseek("tool calls begin"),
        call_begin=f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}",
        infix="\n```json\n",
        call_end=f"\n```{_deepseek('tool call end')}",
        between="\n",
        end=_deepseek("tool calls end"),
        signs=((_deepseek("tool calls begin"), "```json"),),
    ),
    ToolFormat(
        "deepseek-v3.1",
        "header",
        _deepseek("tool calls begin"),
        begin=_deepseek("tool calls begin"),
        call_begin=_deepseek("tool call begin"),
        infix=_deepseek("tool sep"),
        call_end=_deepseek("tool call end"),
        end=_deepseek("tool calls end"),
        signs=((_deepseek("tool calls begin"),),),
    ),
    ToolFormat(
        "mistral-v11",
        "header",
        "[TOOL_CALLS]",
        call_begin="[TOOL_CALLS]",
        aside="[CALL_ID]",
        infix="[ARGS]",
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        id_form="short",
    ),
    ToolFormat(
        "mistral",
        "json",
        "[TOOL_CALLS]",
        begin="[TOOL_CALLS] [",
        head=HEAD,
        between=", ",
        end="]",
        signs=(("[TOOL_CALLS]",),),
        id_form="short",
    ),
    ToolFormat(
        "glm",
        "tagged",
        "<tool_call>",
        call_begin="<tool_call>",
        name_end="\n",
        key_begin="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        call_end="</tool_call>",
        between="\n",
        signs=(("<arg_key>", "<arg_value>"),),
    ),
    ToolFormat(
        "qwen-coder",
        "tagged",
        "<tool_call>",
        call_begin="<tool_call>\n",
        head="<function=",
        name_end=">\n",
        key_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
        call_end="</function>\n</tool_call>",
        between="\n",
        signs=(("<tool_call>", "<function="),),
    ),
    ToolFormat(
        "hermes",
        "json",
        "<tool_call>",
        call_begin="<tool_call>\n",
        head=HEAD,
        call_end="\n</tool_call>",
        between="\n",
        signs=(("<tool_call>",),),
    ),
    ToolFormat(
        "phi",
        "json",
        "<|tool_call|>",
        begin="<|tool_call|> [",
        head=HEAD,
        between=", ",
        end="]<|/tool_call|>",
        signs=(("<|/tool_call|>",), ("<|tool|>",)),
    ),
    ToolFormat(
        "granite", "json", "<|tool_call|>", begin="<|tool_call|> [", head=HEAD, between=", ", end="]",
        signs=(("<|tool_call|>",),),
    ),
    ToolFormat(
        "functools", "json", "functools[", begin="functools[", head=HEAD, between=", ", end="]",
        signs=(("functools[",),),
    ),
    ToolFormat(
        "gemma", "python", "```tool_code", begin="```tool_code\n", between="\n", end="\n```",
        signs=(("```tool_code",),),
    ),
    ToolFormat(
        "pythonic", "python", "[", begin="[", between=", ", end="]", anchored=True, signs=(("[func_name1(",),)
    ),
    ToolFormat(
        "llama", "json", '{"name"', head=HEAD, between="; ", key="parameters", anchored=True,
        signs=(('{"name": ', '"parameters": '),),
    ),
    ToolFormat("json", "json", '{"name"', head=HEAD, between="\n", anchored=True, signs=((),)),
)  # fmt: skip
"""All formats; the first one whose signs a template has is its own."""
THINKING = (
    Thinking("<think>", "</think>", ("<think>", "</think>")),
    Thinking("[THINK]", "[/THINK]", ("[THINK]",)),
    Thinking("<|channel|>analysis<|message|>", "<|end|>", ("<|channel|>",)),
)
"""Marks of reasoning; the first pair of which a template has a sign is its own."""


def format_names() -> tuple[str, ...]:
    """Return the words of `--tool-format`."""
    return tuple(sorted(one.name for one in FORMATS))


def format_named(name: str) -> ToolFormat:
    """Return a format by its name.

    Raises:
        InvalidParameter: there is none of that name.
    """
    for one in FORMATS:
        if one.name == name:
            return one
    raise InvalidParameter(f"The tool format must be one of {', '.join(format_names())}, but is {shown(name)}.")


def format_of(template: str) -> ToolFormat:
    """Return the format that a chat template speaks; plain JSON where it says nothing of calls."""
    return next(one for one in FORMATS if any(all(map(template.__contains__, line)) for line in one.signs))


def thinking_of(template: str) -> Thinking | None:
    """Return the marks of reasoning that a chat template knows; None if it knows none."""
    return next((one for one in THINKING if any(map(template.__contains__, one.signs))), None)


def seen_tokens(tool_format: ToolFormat | None, thinking: Thinking | None, special: Iterable[str]) -> frozenset[str]:
    """Return the special tokens that a reader of answers has to see, since they stand in marks."""
    texts = [*(tool_format.texts if tool_format else ()), *((thinking.begin, thinking.end) if thinking else ())]
    texts += ["<|start|>", "<|call|>", "<|return|>"] if any("<|channel|>" in one for one in texts) else []
    return frozenset(one for one in special if one and any(one in text for text in texts))
