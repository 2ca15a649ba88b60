"""How chat templates of families of models write tools and calls: their tool parts, in words of our own.

Each is as the models' own templates, or those that engines have for them, write a turn that calls; what they say about
tools is shortened to what tells their format.
"""

from dataclasses import dataclass
from typing import Any


def chat(tools: str, calls: str, *, ask: str = "<|a|>", user: str = "<|u|>", result: str = "<|r|>") -> str:
    """Return a template: what it says of tools, a turn that calls, and what begins turns."""
    made = (
        "{% if tools %}" + tools + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for message in messages %}{% if message.tool_calls %}" + calls + "{% elif message.role == 'tool' %}"
        f"{result}{{{{ message.content }}}}"
        "{% elif message.role == 'assistant' %}" + ask + "{{ message.content }}"
        "{% else %}" + user + "{{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + ask + "{% endif %}"
    )
    return made.replace("\n", "{{ '\\n' }}")  # line breaks behind tags would be left out


def each(call: str, between: str = "") -> str:
    """Return what writes a turn's calls, one behind the other."""
    head = "{% for call in message.tool_calls %}{% set own = call.function %}"
    return head + call + "{% if not loop.last %}" + between + "{% endif %}{% endfor %}"


NAME, ARGUMENTS, TEXT = "{{ own.name }}", "{{ own.arguments | tojson }}", "{{ own.arguments }}"
NAMED = f'"name": "{NAME}"'
OBJECT = f'{{{NAMED}, "arguments": {ARGUMENTS}}}'
CONTENT = "{{ message.content or '' }}"
KEYWORDS = (
    "{% for key, value in own.arguments.items() %}{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}"
    "{% endfor %}"
)
PYTHON = f"{NAME}({KEYWORDS})"


def tagged(before: str, middle: str, after: str, plain: str) -> str:
    """Return what writes arguments between tags; `plain` is how values that are no texts are written."""
    return (
        "{% for key, value in own.arguments.items() %}" + before + "{{ key }}" + middle + "{{ " + plain + " }}" + after
    ) + "{% endfor %}"


AS_JSON = "value if value is string else value | tojson"
AS_PYTHON = "value | tojson if value is mapping or (value is sequence and value is not string) else value | string"
"""Qwen3-Coder's template writes numbers, words and nothing as Python does."""


def ds(word: str) -> str:
    """Return a special token of DeepSeek's."""
    return f"<\uff5c{word.replace(' ', chr(0x2581))}\uff5c>"


DS_BEGIN, DS_END, DS_CALL, DS_OVER, DS_SEP = (
    ds(f"tool {one}") for one in ("calls begin", "calls end", "call begin", "call end", "sep")
)
KIMI = "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>"


@dataclass(frozen=True)
class Family:
    """A family's template.

    Args:
        name: the family.
        format: the format that it speaks.
        template: the template.
        end: what ends a turn of the model's, and is no part of its answer.
        texts: whether it takes the JSON of arguments alone.
        single: whether it takes one call a turn.
        canonical: whether it writes calls as the format's grammar does; others are read all the same.
        id: the form of ids that it takes.
    """

    name: str
    format: str
    template: str
    end: str = ""
    texts: bool = False
    single: bool = False
    canonical: bool = True
    id: str = "Ab3dE6gH{number}"


IM, IM_ASK = "<|im_end|>\n", "<|im_start|>assistant\n"
THINK = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
FAMILIES = [
    Family(
        "Hermes",
        "hermes",
        chat(
            '<tools></tools> Write each call as <tool_call>\n{"name": NAME, "arguments": DICT}\n</tool_call>',
            "<|im_start|>assistant"
            + each(f'\n<tool_call>\n{{ "arguments": {ARGUMENTS}, {NAMED}}}\n</tool_call> ')
            + IM,
            ask=IM_ASK,
        ),
        end=IM,
        canonical=False,
    ),
    Family(
        "Qwen 2.5 and 3",
        "hermes",
        chat(
            "<tools></tools> Write calls within <tool_call></tool_call>.",
            IM_ASK + THINK + CONTENT + each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n") + IM,
            ask=IM_ASK,
        ),
        end=IM,
    ),
    Family(
        "Granite 4",
        "hermes",
        chat(
            "Functions stand within <tools></tools>; calls within <tool_call></tool_call>.",
            "<|start_of_role|>assistant<|end_of_role|>"
            + CONTENT
            + each(f"<tool_call>\n{OBJECT}\n</tool_call>", "\n")
            + "<|end_of_text|>\n",
            ask="<|start_of_role|>assistant<|end_of_role|>",
        ),
        end="<|end_of_text|>\n",
    ),
    Family(
        "Qwen3-Coder",
        "qwen-coder",
        chat(
            "<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>\n</function>\n</tool_call>",
            "<|im_start|>assistant"
            + each(
                f"\n<tool_call>\n<function={NAME}>\n"
                + tagged("<parameter=", ">\n", "\n</parameter>\n", AS_PYTHON)
                + "</function>\n</tool_call>"
            )
            + IM,
            ask=IM_ASK,
        ),
        end=IM,
        canonical=False,
    ),
    Family(
        "Llama 3.1",
        "llama",
        chat(
            'Answer with {"name": function name, "parameters": dictionary of arguments}.',
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            + each(f'{{{NAMED}, "parameters": {ARGUMENTS}}}')
            + "<|eot_id|>",
            ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        end="<|eot_id|>",
        single=True,
    ),
    Family(
        "Llama 3.2 and 4, as in Python",
        "pythonic",
        chat(
            "Answer with [func_name1(key=value, other=value), func_name2(...)].",
            "<|start_header_id|>assistant<|end_header_id|>\n\n[" + each(PYTHON, ", ") + "]<|eot_id|>",
            ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        end="<|eot_id|>",
        canonical=False,  # true and null instead of True and None
    ),
    Family(
        "Gemma 3, as in Python",
        "pythonic",
        chat(
            "Answer with a list of calls, as [func_name1(key=value), func_name2(params)].",
            "<start_of_turn>model\n[" + each(PYTHON, ", ") + "]<end_of_turn>\n",
            ask="<start_of_turn>model\n",
        ),
        end="<end_of_turn>\n",
        canonical=False,
    ),
    Family(
        "Gemma 3, blocks",
        "gemma",
        chat(
            "Write calls in a block of ```tool_code.",
            "<start_of_turn>model\n" + CONTENT + "```tool_code\n" + each(PYTHON, "\n") + "\n```<end_of_turn>\n",
            ask="<start_of_turn>model\n",
        ),
        end="<end_of_turn>\n",
        canonical=False,
    ),
    Family(
        "Mistral 7B, with ids",
        "mistral",
        chat(
            "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]",
            "[TOOL_CALLS] ["
            + each(f'{{{NAMED}, "arguments": {ARGUMENTS}, "id": "{{{{ call.id }}}}"}}', ", ")
            + "]</s>",
            ask="",
        ),
        end="</s>",
        canonical=False,
    ),
    Family(
        "Mistral 7B",
        "mistral",
        chat("[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]", "[TOOL_CALLS] [" + each(OBJECT, ", ") + "]</s>", ask=""),
        end="</s>",
    ),
    Family(
        "Mistral Nemo",
        "mistral",
        chat("[AVAILABLE_TOOLS][/AVAILABLE_TOOLS]", "[TOOL_CALLS][" + each(OBJECT, ", ") + "]</s>", ask=""),
        end="</s>",
    ),
    Family(
        "Mistral Small 3.2",
        "mistral-v11",
        chat(
            "[AVAILABLE_TOOLS][/AVAILABLE_TOOLS]",
            each(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ call.id }}}}[ARGS]{ARGUMENTS}") + "</s>",
            ask="",
        ),
        end="</s>",
    ),
    Family(
        "Ministral 3",
        "mistral-v11",
        chat(
            "[AVAILABLE_TOOLS][/AVAILABLE_TOOLS]",
            CONTENT + each(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}") + "</s>",
            ask="",
        ),
        end="</s>",
    ),
    Family(
        "DeepSeek V3 and R1",
        "deepseek",
        chat(
            f"{DS_BEGIN}{DS_CALL}function{DS_SEP}NAME\n```json\nARGUMENTS\n```{DS_OVER}",
            CONTENT
            + DS_BEGIN
            + each(f"{DS_CALL}function{DS_SEP}{NAME}\n```json\n{ARGUMENTS}\n```{DS_OVER}", "\n")
            + DS_END
            + ds("end of sentence"),
            ask="",
            user=ds("User"),
        ),
        end=ds("end of sentence"),
    ),
    Family(
        "DeepSeek V3.1",
        "deepseek-v3.1",
        chat(
            f"{DS_BEGIN}{DS_CALL}NAME{DS_SEP}ARGUMENTS{DS_OVER}",
            "{{ message.content + '' if message.content else '' }}"
            + DS_BEGIN
            + each(f"{DS_CALL}{{{{ own.name + '{DS_SEP}' + own.arguments }}}}{DS_OVER}")
            + DS_END
            + ds("end of sentence"),
            ask="",
        ),
        end=ds("end of sentence"),
        texts=True,
    ),
    Family(
        "GLM-4.5 and 4.6",
        "glm",
        chat(
            "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
            "<|assistant|>\n<think></think>"
            + each(
                f"\n<tool_call>{NAME}\n"
                + tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", AS_JSON)
                + "</tool_call>"
            )
            + "<|user|>",
            ask="<|assistant|>",
        ),
        end="<|user|>",
        canonical=False,  # its thoughts stand before
    ),
    Family(
        "GLM-4.7",
        "glm",
        chat(
            "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
            "<|assistant|></think>"
            + each(
                f"<tool_call>{NAME}"
                + tagged("<arg_key>", "</arg_key><arg_value>", "</arg_value>", AS_JSON)
                + "</tool_call>"
            )
            + "<|user|>",
            ask="<|assistant|></think>",
        ),
        end="<|user|>",
        canonical=False,
    ),
    Family(
        "Kimi K2",
        "kimi",
        chat(
            "<|im_system|>tool_declare<|im_middle|>",
            "<|im_assistant|>assistant<|im_middle|>"
            + CONTENT
            + "<|tool_calls_section_begin|>"
            + each(KIMI)
            + "<|tool_calls_section_end|><|im_end|>",
            ask="<|im_assistant|>assistant<|im_middle|>",
        ),
        end="<|im_end|>",
        id="functions.{name}:{number}",
    ),
    Family(
        "Phi-4-mini",
        "phi",
        chat(
            "<|tool|><|/tool|>",
            "<|assistant|><|tool_call|>[" + each(OBJECT, ", ") + "]<|/tool_call|><|end|>",
            ask="<|assistant|>",
        ),
        end="<|end|>",
    ),
    Family(
        "Phi-4-mini, a mark for each call",
        "phi",
        chat(
            '<|tool|><|/tool|>Answer with <|tool_call|>{"name": NAME, "arguments": DICT}<|/tool_call|>.',
            "<|assistant|>" + CONTENT + each(f"<|tool_call|>{OBJECT}<|/tool_call|>") + "<|end|>",
            ask="<|assistant|>",
        ),
        end="<|end|>",
        canonical=False,
    ),
    Family(
        "Phi-4-mini, functools",
        "functools",
        chat(
            'Write calls as one list: functools[{"name": NAME, "arguments": DICT}, ...].',
            "<|assistant|>functools[" + each(OBJECT, ", ") + "]<|end|>",
            ask="<|assistant|>",
        ),
        end="<|end|>",
    ),
    Family(
        "Granite 3",
        "granite",
        chat(
            "Answer with <|tool_call|> and a list of the tools that are used.",
            "<|start_of_role|>assistant<|end_of_role|><|tool_call|>[" + each(OBJECT, ", ") + "]<|end_of_text|>\n",
            ask="<|start_of_role|>assistant<|end_of_role|>",
        ),
        end="<|end_of_text|>\n",
    ),
    Family(
        "gpt-oss",
        "harmony",
        chat(
            "Calls of functions go to the commentary <|channel|>.",
            "<|start|>assistant"
            + each(f" to=functions.{NAME}<|channel|>commentary json<|message|>{ARGUMENTS}")
            + "<|call|>",
            ask="<|start|>assistant",
            user="<|start|>user<|message|>",
        ),
        end="<|call|>",
        single=True,
        canonical=False,  # the other place of the name
    ),
    Family(
        "gpt-oss, as its models write",
        "harmony",
        chat(
            "Calls of functions go to the commentary <|channel|>.",
            "<|start|>assistant"
            + each(f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGUMENTS}")
            + "<|call|>",
            ask="<|start|>assistant",
            user="<|start|>user<|message|>",
        ),
        end="<|call|>",
        single=True,
    ),
    Family(
        "others",
        "json",
        chat("These tools there are:", "<|a|>" + each(OBJECT, "\n") + "<|e|>"),
        end="<|e|>",
    ),
]


def message(calls: list[tuple[str, dict[str, Any]]], family: Family, arguments: Any = dict) -> dict[str, Any]:
    """Return a message of a model's that calls; `arguments` says how its arguments are told."""
    told = [
        {
            "id": family.id.format(name=name, number=number),
            "type": "function",
            "function": {"name": name, "arguments": arguments(given)},
        }
        for number, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": told}
