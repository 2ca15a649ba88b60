"""Answers in every format of calls, as models write them, and what is in them."""

from dataclasses import dataclass, field
from typing import Any

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "tags": {"type": "array"}}},
}
PARIS: dict[str, Any] = {"city": "Paris", "days": 3}
LIMA: dict[str, Any] = {"city": "Lima"}
Calls = list[tuple[str, dict[str, Any]]]
BOTH: Calls = [("weather", PARIS), ("weather", LIMA)]


@dataclass(frozen=True)
class Example:
    """An answer, and what is in it."""

    format: str
    text: str
    calls: Calls = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    begun: bool = False


NASTY = {"query": 'a "</tool_call>" \\ {[ ü\n', "tags": ["]", "}", '"']}
NASTY_JSON = '{"query": "a \\"</tool_call>\\" \\\\ {[ ü\\n", "tags": ["]", "}", "\\""]}'
DS = [
    f"<\uff5ctool\u2581{one}\uff5c>"
    for one in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]
EXAMPLES = [
    Example("hermes", "Just words, 1 < 2.", content="Just words, 1 < 2."),
    Example("hermes", "", content=""),
    Example(
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        [("weather", PARIS)],
    ),
    Example(
        "hermes",
        "Let me see.\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
        "\n</tool_call>\n<tool_call>\n"
        '{"arguments": {"city": "Lima"}, "name": "weather"}'
        "\n</tool_call>\n",
        BOTH,
        content="Let me see.",
    ),
    Example(
        "hermes",
        "<think>\nHm <tool_call> no.\n</think>\n\n<tool_call>\n"
        f'{{"name": "search", "arguments": {NASTY_JSON}}}</tool_call>',
        [("search", NASTY)],
        reasoning="Hm <tool_call> no.",
    ),
    Example("hermes", "so</think>\n\nYes.", content="Yes.", reasoning="so", begun=True),
    Example("hermes", "so on", reasoning="so on", begun=True),
    Example("hermes", '<tool_call>{"name": "now"}</tool_call> Done.', [("now", {})], content="Done."),
    Example("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Lima\\"}"}</tool_call>', BOTH[1:]),
    Example("hermes", "<tool_call> is a tag.", content="<tool_call> is a tag."),
    Example("hermes", '<tool_call>{"a": 1}</tool_call>', content='<tool_call>{"a": 1}</tool_call>'),
    Example(
        "hermes",
        '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [("now", {})],
        content="<tool_call>",
    ),
    Example(
        "qwen-coder",
        "On it.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nLima\n</parameter>\n</function>\n"
        "</tool_call>",
        BOTH,
        content="On it.",
    ),
    Example(
        "qwen-coder",
        "<tool_call>\n<function=search>\n<parameter=query>\n\n <b> 12\n\n</parameter>\n<parameter=tags>\n"
        '["a", {"b": null}]\n</parameter>\n</function>\n</tool_call>',
        [("search", {"query": "\n <b> 12\n", "tags": ["a", {"b": None}]})],
    ),
    Example("qwen-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", {})]),
    Example(
        "glm",
        "<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Lima</arg_value>\n</tool_call>",
        BOTH,
    ),
    Example("glm", "<tool_call>now\n</tool_call>", [("now", {})]),
    Example("llama", '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}', BOTH[:1]),
    Example(
        "llama",
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "weather", "parameters": {"city": "Lima"}}',
        BOTH,
    ),
    Example("llama", '{"name": "Bob", "age": 3}', content='{"name": "Bob", "age": 3}'),
    Example("llama", ' {"names": ["Bob"]} ', content=' {"names": ["Bob"]} '),
    Example("llama", 'Say {"name": "now"}', content='Say {"name": "now"}'),
    Example("json", '\n{"name": "weather", "arguments": {"city": "Lima"}}\n', BOTH[1:]),
    Example(
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 3}, "id": "Ab3dE6gH9"}, '
        '{"name": "weather", "arguments": {"city": "Lima"}, "id": "zz3dE6gH9"}]',
        BOTH,
    ),
    Example(
        "mistral-v11",
        '[THINK]Hm.[/THINK]Sure.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]weather[ARGS]'
        '{"city": "Lima"}',
        BOTH,
        content="Sure.",
        reasoning="Hm.",
    ),
    Example(
        "deepseek",
        f'{DS[0]}{DS[1]}function{DS[2]}weather\n```json\n{{"city": "Paris", "days": 3}}\n```{DS[3]}\n'
        f'{DS[1]}function{DS[2]}weather\n```json\n{{"city": "Lima"}}\n```{DS[3]}{DS[4]}',
        BOTH,
    ),
    Example(
        "deepseek-v3.1",
        f'I look.{DS[0]}{DS[1]}weather{DS[2]}{{"city": "Paris", "days": 3}}{DS[3]}'
        f'{DS[1]}weather{DS[2]}{{"city": "Lima"}}{DS[3]}{DS[4]}',
        BOTH,
        content="I look.",
    ),
    Example(
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.weather:1'
        '<|tool_call_argument_begin|>{"city": "Lima"}<|tool_call_end|><|tool_calls_section_end|>',
        BOTH,
    ),
    Example(
        "phi",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "weather", "arguments": {"city": "Lima"}}]<|/tool_call|>',
        BOTH,
    ),
    Example("functools", 'functools[{"name": "weather", "arguments": {"city": "Lima"}}]', BOTH[1:]),
    Example("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Lima"}}]', BOTH[1:]),
    Example("gemma", "Sure:\n```tool_code\nweather(city=\"Paris\", days=3)\nweather(city='Lima')\n```", BOTH, "Sure:"),
    Example("pythonic", '[weather(city="Paris", days=3), weather(city="Lima")]', BOTH),
    Example(
        "pythonic",
        "[search(query='it\\'s )', tags=[\"]\", -1.5, True, None, {'a': (1,)}])]",
        [("search", {"query": "it's )", "tags": ["]", -1.5, True, None, {"a": [1]}]})],
    ),
    Example("pythonic", "[1] says so", content="[1] says so"),
    Example("pythonic", "[run(a=1)]", content="[run(a=1)]"),
    Example("pythonic", "[now()]", [("now", {})]),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Lima"}<|call|>',
        BOTH[1:],
        content="I look.",
        reasoning="Need it.",
    ),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.now<|channel|>"
        "commentary json<|message|>{}",
        [("now", {})],
        reasoning="So.",
    ),
    Example("harmony", "<|channel|>final<|message|>Hello <b>.", content="Hello <b>."),
    Example("harmony", "Hello <b>.", content="Hello <b>."),
]
