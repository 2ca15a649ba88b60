"""A tiny chat model whose template tells of tools, calls, their results, and reasoning."""

from pathlib import Path

from chatml import save_chat_model

HERMES = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call them in <tool_call></tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if reasoning_effort %}<think>\n{% endif %}{% endif %}"
)
WITHOUT_THOUGHTS = HERMES.replace("<think>", "").replace("</think>", "")


def save_tool_model(folder: Path, *, thinks: bool = False) -> Path:
    """Save a random model with such a template as a folder, and return it."""
    return save_chat_model(folder, template=HERMES if thinks else WITHOUT_THOUGHTS)


def tool(name: str, parameters: dict, *, strict: bool = False) -> dict:
    """Return a tool as OpenAI's clients say it."""
    function = {"name": name, "description": f"{name} it", "parameters": parameters}
    return {"type": "function", "function": {**function, **({"strict": True} if strict else {})}}
