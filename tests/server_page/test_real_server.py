"""The page against the real server, with the embedded pair and a chat model: what both say of a text and its trees."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server_page.conftest import save_pictures
from server_page.driving import alert, answer, send, until

pytestmark = pytest.mark.browser

PROMPT = "def fib(n):\n"
KEEPS_ANSWERS = """
    const own = window.fetch;
    window.answers = [];
    window.fetch = async (to, init) => {
        const answer = await own(to, init);
        if (init?.method === "POST") window.answers.push([JSON.parse(init.body), answer.clone().text()]);
        return answer;
    };
"""


def watched(open_page: Callable, url: str) -> Iterator:
    """Open the page of a real server; nothing may be said to the console, and nothing asked of another host."""
    said, hosts = [], set()

    def watch(page) -> None:
        page.add_init_script(KEEPS_ANSWERS)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))

    yield open_page(url, watch=watch)
    assert hosts == {urlsplit(url).netloc}
    # Chromium says by itself of every refused request that it was refused.
    assert [one for one in said if "status of 400" not in one] == []


@pytest.fixture
def real_page(open_page: Callable, real_server) -> Iterator:
    """The page of the server with the embedded pair."""
    yield from watched(open_page, real_server.url)


@pytest.fixture
def chat_page(open_page: Callable, chat_server) -> Iterator:
    """The page of the server with a chat model."""
    yield from watched(open_page, chat_server.url)


def asked(page, act: Callable[[], None]) -> tuple[dict, list[dict]]:
    """The request that an act sends, and the chunks of its answer."""
    before = page.evaluate("window.answers.length")
    act()
    until(page, f"window.answers.length === {before + 1}")
    request = page.evaluate(f"window.answers[{before}][0]")
    body = page.evaluate(f"window.answers[{before}][1]")
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return request, [json.loads(event) for event in events[:-1]]


def text_of(chunks: list[dict], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    own = [choice for choice in choices if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in own)


def settings(page, values: dict[str, object]) -> None:
    page.click("#open-settings")
    if not page.is_visible("#n"):
        page.click("#more summary")
    for name, value in values.items():
        if name in ("format", "drafter", "verifier"):
            page.select_option(f"#{name}", str(value))
        else:
            page.fill(f"#{name}", str(value))
    page.keyboard.press("Escape")


def test_a_text_and_its_comparison_are_those_of_the_server(real_page) -> None:
    page = real_page
    assert page.text_content("#target").startswith("polydraft-embedded") and page.is_visible("#no-chat")
    settings(page, {"temperature": 0, "max_tokens": 64, "seed": 1, "drafter": "model"})
    request, chunks = asked(page, lambda: send(page, PROMPT))
    steps = [chunk["polydraft"] for chunk in chunks if "tree" in chunk.get("polydraft", {})]

    assert request["temperature"] == 0 and request["speculative"]["trace"]
    assert answer(page) == PROMPT + text_of(chunks) and text_of(chunks)
    _check_origins(page, steps)
    _check_trees(page, steps)
    values = [float(value.split()[0]) for value in page.locator("#meters .value").all_text_contents()]
    assert values[0] > 0 and values[1] == pytest.approx(steps[-1]["tokens_per_call"], abs=0.005)
    assert values[2] == round(100 * steps[-1]["acceptance_by_depth"][0])
    assert page.locator("#meters .bar").count() == len(steps[-1]["acceptance_by_depth"])
    assert page.locator("#meters path.line").count() == 2

    _, plain = asked(page, lambda: page.click("text=Compare with plain decoding"))
    until(page, "document.querySelector('#close-compare').textContent === 'Close'")
    assert page.text_content("#text-plain") == text_of(plain)
    assert page.text_content("#text-drafted") == text_of(chunks)
    assert page.locator("#text-drafted .drafted").count() and not page.locator("#text-plain .drafted").count()
    assert "fast" in page.text_content("#ratio") or "speed" in page.text_content("#ratio")
    assert all(float(page.text_content(f"#clock-{side}").split()[0]) > 0 for side in ("drafted", "plain"))


def test_a_chat_goes_on_with_what_was_said(chat_page) -> None:
    page = chat_page
    assert page.text_content("#target").startswith("tiny-chat") and not page.is_visible("#no-chat")
    assert page.is_checked("input[name=mode][value=chat]")
    # The page shows control characters as signs, and a random model would write them.
    settings(page, {"temperature": 0, "max_tokens": 40, "seed": 1, "format": "regex", "form": "[a-z ]{60}"})
    first, chunks = asked(page, lambda: send(page, "How many are there?"))
    said = {"role": "user", "content": "How many are there?"}
    assert first["messages"] == [said] and answer(page) == text_of(chunks) != ""
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"

    second, more = asked(page, lambda: send(page, "And then?"))
    answers = [{"role": "assistant", "content": text_of(chunks)}, {"role": "user", "content": "And then?"}]
    assert second["messages"] == [said, *answers] and answer(page) == text_of(more) != ""
    steps = [chunk["polydraft"] for chunk in more if "tree" in chunk.get("polydraft", {})]
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == text_of(more)
    assert steps[-1]["accepted"] > 0
    assert page.locator("#turns > :last-child .drafted").count() and page.locator("#legend li").count() >= 2
    assert page.locator("#alert:not(:empty)").count() == 0


def test_pictures_of_pages_are_saved(chat_page, tmp_path: Path) -> None:
    save_pictures([chat_page], tmp_path / "own", "a test[with: words]")
    assert (tmp_path / "own" / "a-test-with-words--0.png").read_bytes().startswith(b"\x89PNG")


def _check_origins(page, steps: list[dict]) -> None:
    """The colours and the legend are those of the trace."""
    tokens = [token for step in steps for token in step["tokens"]]
    drafted = [token["text"] for token in tokens if token["origin"] != "target"]
    counts = {line.split("(")[0].rsplit(maxsplit=1)[0]: line for line in page.locator("#legend li").all_text_contents()}
    assert {token["origin"] for token in tokens} == {"target", "model"} and set(counts) == {
        "target\u2019s own",
        "model",
    }
    assert int(counts["model"].split("(")[0].split()[-1]) == len(drafted) > 0
    coloured = "".join(page.locator(".answer .drafted").all_text_contents())
    assert "".join(coloured.split()) == "".join("".join(drafted).split())


def _check_trees(page, steps: list[dict]) -> None:
    """Every step of the slider shows the accepted path of its tree, and what the target wrote behind it."""
    until(page, f"document.querySelector('#step').max === '{len(steps)}'")
    page.focus("#step")
    page.keyboard.press("Home")
    seen = 0
    for place, step in enumerate(steps, 1):
        until(page, f"document.querySelector('#tree-of').textContent === 'step {place} of {len(steps)}'")
        path = [step["tree"]["tokens"][node] for node in step["tree"]["accepted"] if node]
        shown = page.locator(".node.accepted title").all_text_contents()
        assert len(shown) == len(path) and page.locator(".node.next").count() == 1
        words = page.text_content("#tree-words")
        assert all(token.strip() in words for token in path) and ("kept: " in words) == bool(path)
        assert ("The text ended after" in words) == (len(step["tokens"]) <= len(path))
        seen += min(len(path), len(step["tokens"]))
        page.keyboard.press("ArrowRight")
    assert seen == steps[-1]["accepted"] > 0


def test_the_server_takes_every_setting_of_the_page(real_page) -> None:
    page = real_page
    numbers = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 24, "seed": 3, "top_k": 50, "min_p": 0.01}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "n": 2}
    drafts = {"drafter": "model", "verifier": "recursive-wo", "tree": "2,1", "prediction": "abc abc"}
    settings(page, {**numbers, **penalties, **drafts, "stop_strings": "\\n\\n", "format": "regex", "form": "[a-c ]{8}"})

    def go() -> None:
        send(page, PROMPT, wait=False)
        page.wait_for_selector(".answer[aria-busy=false] >> nth=1")

    request, chunks = asked(page, go)
    assert {name: request[name] for name in [*numbers, *penalties]} == numbers | penalties
    for index in range(2):
        text = text_of(chunks, index)
        assert len(text) == 8 and set(text) <= set("abc ")
        assert page.text_content(f".answer .text >> nth={index}") == PROMPT + text
    assert page.locator("#alert:not(:empty)").count() == 0


@pytest.mark.parametrize(
    ("values", "name", "place"),
    [
        ({"top_k": -5}, "Top k", "top_k"),
        ({"min_p": 2}, "Min p", "min_p"),
        ({"presence_penalty": 3}, "Presence penalty", "presence_penalty"),
        ({"frequency_penalty": -3}, "Frequency penalty", "frequency_penalty"),
        ({"repetition_penalty": 0}, "Repetition penalty", "repetition_penalty"),
        ({"n": 0}, "Answers at once", "n"),
        ({"n": 1.5}, "Answers at once", "n"),
        ({"format": "regex", "form": "("}, "Structured output", "form"),
        ({"format": "json_schema", "form": "[]"}, "Structured output", "form"),
        ({"format": "json_schema", "form": '{"type": "nonsense"}'}, "Structured output", "form"),
        ({"format": "grammar", "form": "start: nothing"}, "Structured output", "form"),
        ({"temperature": 101}, "Temperature", "temperature"),
        ({"seed": -2}, "Seed", "seed"),
        ({"tree": "nonsense"}, "Tree", "tree"),
        ({"max_draft_tokens": 500}, "Max draft tokens", "max_draft_tokens"),
    ],
)
def test_an_error_of_the_server_leads_to_its_field(real_page, values: dict, name: str, place: str) -> None:
    page = real_page
    settings(page, values)
    page.click("#open-settings")
    page.click("#more summary")  # closed: the error opens it again
    page.keyboard.press("Escape")
    send(page, PROMPT, wait=False)
    said = alert(page)
    assert said.startswith(name) and said.endswith(".")
    page.click("#alert button")
    assert page.evaluate("document.activeElement.id") == place
