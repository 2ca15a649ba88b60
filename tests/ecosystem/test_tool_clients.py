"""Agents' libraries against the server, as they are: tools offered, called, answered, and structured output.

The model is tiny and has learnt two answers by heart: a call when it is asked how warm it is, and a sentence when the
result is there.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from chatml import END, chat_model, chat_tokenizer
from serving import served
from tool_models import tool

from polydraft.models import conversation_ids

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]
pytest.importorskip("llguidance", reason="grammars need llguidance")
TEMPLATE = (
    "{% if tools %}You have{% for tool in tools %} {{ tool.function.name }}{% endfor %}.\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION, ANSWER = "How warm is it in Lima?", "It is 20 degrees."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLED = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Lima"}}}
ASKED = {"role": "user", "content": QUESTION}


class Unit(StrEnum):
    """What is measured in."""

    CELSIUS = "celsius"
    KELVIN = "kelvin"


def get_weather(city: str) -> str:
    """Tell how warm it is in a city."""
    return "20" if city == "Lima" else "unknown"


def learn_by_heart(model: torch.nn.Module, texts: list[tuple[list[int], list[int]]]) -> None:
    """Train until every answer is what the model is most certain of."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(1500):
        found, loss = True, torch.zeros(())
        for prompt, answer in texts:
            ids = torch.tensor([[*prompt, *answer]])
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :])
            found &= bool((logits.argmax(-1) == ids[0, len(prompt) :]).all())
        if found and float(loss) < 0.02:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError("it has not learnt its answers")


@dataclass(frozen=True)
class Server:
    """Where it is, and what its model is called."""

    address: str
    name: str = "agent"

    @property
    def base(self) -> str:
        return f"{self.address}/v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, tokenizer = tmp_path_factory.mktemp("models") / "agent", chat_tokenizer(TEMPLATE)
    model = chat_model(tokenizer)
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "tool", "content": "20"}]
    offered, end = [tool("get_weather", CITY)], tokenizer.convert_tokens_to_ids(END)
    texts = [
        (conversation_ids(tokenizer, said, offered), [*tokenizer(answer)["input_ids"], end])
        for said, answer in ((messages[:1], CALL), (messages, ANSWER))
    ]
    with torch.enable_grad():
        learn_by_heart(model, texts)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    with served(target=str(folder), model_name="agent", drafter="ngram") as address:
        yield Server(address)


def test_openai(server: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.base, api_key="none", max_retries=0)
    given: dict[str, Any] = {"model": server.name, "tools": [tool("get_weather", CITY)], "temperature": 0}
    first = client.chat.completions.create(messages=[ASKED], **given).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls" and json.loads(call.function.arguments) == {"city": "Lima"}
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather("Lima")}
    with client.chat.completions.stream(messages=[ASKED, first.message.model_dump(), result], **given) as stream:
        last = stream.get_final_completion().choices[0]
    assert last.message.content == ANSWER and last.finish_reason == "stop"


def test_langchain_binds_tools(server: Server) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="make test-ecosystem installs it")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as as_tool

    model = langchain_openai.ChatOpenAI(base_url=server.base, api_key="none", model=server.name, temperature=0)
    offered = as_tool(get_weather)
    for strict in (None, True):
        bound = model.bind_tools([offered], strict=strict)
        said: list[Any] = [HumanMessage(QUESTION)]
        said.append(bound.invoke(said))
        (call,) = said[-1].tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Lima"}) and not said[-1].invalid_tool_calls
        said.append(ToolMessage(offered.invoke(call["args"]), tool_call_id=call["id"]))
        assert bound.invoke(said).content == ANSWER
        whole = None
        for piece in bound.stream(said[:1]):
            whole = piece if whole is None else whole + piece
        assert whole is not None and [one["args"] for one in whole.tool_calls] == [{"city": "Lima"}]
    forced = model.bind_tools([offered], tool_choice="get_weather").invoke("Say something else.")
    assert {one["name"] for one in forced.tool_calls} == {"get_weather"}


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structures_its_output(server: Server, method: str) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="make test-ecosystem installs it")
    pydantic = pytest.importorskip("pydantic")
    Measure = pydantic.create_model("Measure", unit=(Unit, ...), sure=(bool, ...))
    model = langchain_openai.ChatOpenAI(base_url=server.base, api_key="none", model=server.name, temperature=0)
    found = model.with_structured_output(Measure, method=method).invoke("In which unit?")
    assert isinstance(found, Measure) and found.unit in Unit


def test_pydantic_ai(server: Server) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-ecosystem installs it")
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def answers() -> list[Any]:
        async with AsyncOpenAI(base_url=server.base, api_key="none") as client:
            model = OpenAIChatModel(server.name, provider=OpenAIProvider(openai_client=client))
            agents = [
                (pydantic_ai.Agent(model, tools=[get_weather], model_settings={"temperature": 0}), QUESTION),
                (pydantic_ai.Agent(model, output_type=Unit, model_settings={"temperature": 0}), "In which unit?"),
            ]
            return [(await agent.run(question)).output for agent, question in agents]

    said, unit = asyncio.run(answers())
    assert said == ANSWER and unit in Unit


@pytest.fixture
def llm_folder(server: Server, tmp_path: Path) -> Path:
    """The folder in which `llm` finds the server."""
    line = {"model_id": "served", "model_name": server.name, "api_base": server.base, "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([line]))  # JSON is YAML
    return tmp_path


def test_llm(llm_folder: Path) -> None:
    pytest.importorskip("llm", reason="make test-ecosystem installs it")
    function = 'def get_weather(city: str) -> str:\n    "Tell how warm it is."\n    return "20"\n'
    command = ["llm", "-m", "served", "-o", "temperature", "0", "--functions", function, QUESTION]
    places = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LLM_USER_PATH": str(llm_folder)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **places})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == ANSWER


def test_llm_in_python(llm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed, as it is unless told otherwise: the call in pieces, then the answer."""
    llm = pytest.importorskip("llm", reason="make test-ecosystem installs it")
    monkeypatch.setenv("LLM_USER_PATH", str(llm_folder))
    called: list[tuple[str, Any, str]] = []

    def note(_: Any, call: Any, result: Any) -> None:
        called.append((call.name, call.arguments, result.output))

    options = {"temperature": 0}
    pieces = [*llm.get_model("served").chain(QUESTION, tools=[get_weather], after_call=note, options=options)]
    assert called == [("get_weather", {"city": "Lima"}, "20")]
    assert "".join(pieces) == ANSWER and len(pieces) > 1
