"""The page in a browser: streaming, tree, charts, comparison, errors, reconnecting, keyboard, phone, dark, axe."""

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from server_page.driving import alert, answer, send, until
from server_page.texts import NASTY, SCRIPTS, STORY, other_text

pytestmark = pytest.mark.browser

PAGE = Path(__file__).parents[2] / "src" / "polydraft" / "server" / "page"
MOST_BYTES = 101_000


def last_body(server) -> dict:
    with urllib.request.urlopen(server.url + "bodies") as answer:
        return json.load(answer)[-1]


def test_the_page_is_small_and_fetches_nothing_from_elsewhere() -> None:
    files = [path for path in PAGE.iterdir() if path.is_file()]
    assert {path.suffix for path in files} == {".html", ".js", ".css", ".svg"}
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, path.name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and " style=" not in text, path.name


def test_text_streams_and_shows_whose_words_they_are(page) -> None:
    send(page, "pace", wait=False)
    until(page, "document.querySelectorAll('.answer .drafted').length > 3")
    early = answer(page)
    assert STORY.startswith(early) and len(early) < len(STORY)
    page.wait_for_selector(".answer .foot button")
    assert answer(page) == STORY
    colours = page.eval_on_selector_all(
        ".answer .drafted", "all => [...new Set(all.map(e => e.dataset.colour))].sort()"
    )
    assert colours == ["0", "1"]
    lines = page.eval_on_selector_all(
        ".answer .drafted", "all => [...new Set(all.map(e => getComputedStyle(e).textDecorationStyle))].length"
    )
    assert lines == 2
    legend = page.eval_on_selector_all("#legend li", "all => all.map(e => e.textContent)")
    counts = [int(line.split("(")[0].split()[-1]) for line in legend]
    assert legend[0].startswith("target") and len(legend) == 3
    assert sum(counts) == int(page.text_content(".answer .numbers").split()[0])


def test_events_are_read_whatever_pieces_they_come_in(page) -> None:
    sent = ": hello\r\n\r\ndata: one\r\n\r\nevent: x\r\ndata:two\r\ndata: \u00e9\U0001f600\n\ndata: three\r\rdata: last"
    for size in (1, 2, 3, 1000):
        read = page.evaluate(
            """async ([sent, size]) => {
                const { events } = await import('/page/run.js');
                const bytes = new TextEncoder().encode(sent);
                const body = new ReadableStream({ start(controller) {
                    for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
                    controller.close();
                } });
                const all = [];
                for await (const data of events(body)) all.push(data);
                return all;
            }""",
            [sent, size],
        )
        assert read == ["one", "two\n\u00e9\U0001f600", "three", "last"]


def test_the_coloured_text_is_that_of_the_deltas_however_they_lag(page) -> None:
    """Tokens that are halves of a character, that have no text, or a space less; deltas that lag or end early."""
    differing = page.evaluate(
        """async () => {
            const { Painter, Palette } = await import('/page/text.js');
            let state = 1;
            const draw = n => (state = (state * 48271) % 2147483647) % n;
            const kinds = [['word', ' word'], ['<|x|>', ''], // a token's text and its delta
                [' a', ' a'], ['\\n', '\\n'], ['b', ' b'], ['  ', '  '], [' c', 'c']];
            const differing = [];
            for (let round = 0; round < 300; round += 1) {
                const box = document.createElement('div');
                const painter = new Painter(box, new Palette());
                let all = '', shown = '', step = 0;
                for (let i = 0; i < 30; i += 1) {
                    const tokens = [];
                    for (let k = draw(4); k >= 0; k -= 1) {
                        const half = draw(6) === 0;
                        const [text, delta] = kinds[draw(kinds.length)];
                        const origin = draw(2) ? 'target' : 'drafter';
                        if (half) tokens.push({ text: '\ufffd', origin }, { text: '\ufffd', origin });
                        else tokens.push({ text, origin });
                        all += half ? '\U0001f600' : delta;
                    }
                    const lag = i === 29 ? draw(3) && draw(9) : draw(12);
                    const upto = Math.max(shown.length, all.length - lag);
                    painter.add(++step, tokens, all.slice(shown.length, upto));
                    shown = all.slice(0, upto);
                    if (draw(2)) painter.flush();
                }
                painter.end();
                if (box.textContent !== shown || painter.text !== shown) differing.push([shown, box.textContent]);
            }
            return differing;
        }"""
    )
    assert differing == []


def test_the_tree_shows_the_accepted_path_and_earlier_steps(page) -> None:
    send(page)
    steps = int(page.get_attribute("#step", "max"))
    assert page.get_attribute("#step", "aria-valuetext") == f"step {steps} of {steps}"
    page.focus("#step")
    page.keyboard.press("Home")
    until(page, "document.querySelector('#tree-of').textContent.startsWith('step 1 of')")
    seen = 0
    for step in range(2, 7):
        page.keyboard.press("ArrowRight")
        until(page, f"document.querySelector('#tree-of').textContent.startsWith('step {step} of')")
        kept = page.eval_on_selector_all(".node.accepted text", "all => all.map(e => e.textContent)")
        said = page.text_content("#tree-words")
        bare = [token.replace("\u2423", "") for token in kept]
        assert all(f"\u201c{token}\u201d" in said for token in bare if token) and "\u2423" not in said
        assert page.get_attribute("#tree-box svg", "aria-label") == said
        assert page.locator(".node.next").count() == page.locator(".node.root").count() == 1
        marked = "".join(page.eval_on_selector_all(".chosen", "all => all.map(e => e.textContent)"))
        bare = "".join(kept).replace("\u2423", "").replace("\u21b5", "")
        assert "".join(marked.split()).startswith(bare)
        seen += len(kept)
    assert seen
    page.focus("#tree-box")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('#tree-of').textContent.startsWith('step 5 of')")
    page.click("#tree-details summary")
    until(page, "document.querySelector('#tree-list').textContent.split('\\n')[0].trim()")  # it is made when it opens
    page.click(".answer .drafted >> nth=0")
    until(page, "document.querySelector('#tree-of').textContent.startsWith('step 1 of')")


SHOWN = """(view => {
    const nodes = [...document.querySelectorAll(".node.accepted rect, .node.next rect")];
    const inside = at => view.top <= at.top && at.right <= view.right + 1;
    return nodes.length > 0 && nodes.every(node => inside(node.getBoundingClientRect()));
})(document.querySelector("#tree-box").getBoundingClientRect())"""
"""Whether the nodes of the kept path lie within the box, below its top and left of its right side."""


def test_a_large_tree_scrolls_or_is_shown_whole(page) -> None:
    send(page, "bushy")
    box, tree = "#tree-box", "#tree-box svg"
    assert page.eval_on_selector(box, "box => box.scrollHeight > box.clientHeight")
    until(page, SHOWN)  # the last step is drawn in a frame of its own
    page.click("#whole")
    until(page, f"document.querySelector('{tree}').clientHeight <= document.querySelector('{box}').clientHeight")
    assert page.get_attribute("#whole", "aria-pressed") == "true"


def test_an_earlier_step_can_be_looked_at_while_text_comes(page) -> None:
    send(page, "slow", wait=False)
    until(page, "Number(document.querySelector('#step').max) > 3")
    page.click("#earlier")
    page.wait_for_timeout(700)
    shown, last = page.text_content("#tree-of").removeprefix("step ").split(" of ")
    assert int(shown) < int(last) - 1
    page.click("#latest")
    until(page, "(t => t[1] === t[3])(document.querySelector('#tree-of').textContent.split(' '))")
    page.keyboard.press("Escape")


def test_tokens_in_sentences_have_no_marks_of_spaces(page) -> None:
    said = page.evaluate(
        """async () => {
            const { quoted } = await import('/page/text.js');
            return [' The', 'a b ', ' ', '    ', '', ':\\n    ', '\\t', '\u202e', 'x'].map(quoted);
        }"""
    )
    named = ["a space", "4 spaces", "an empty token"]
    signs = ["\u201c:\u21b5\u201d", "\u201c\u21e5\u201d", "\u201c\u27e8U+202E\u27e9\u201d", "\u201cx\u201d"]
    assert said == ["\u201cThe\u201d", "\u201ca b\u201d", *named, *signs]


def test_one_is_one_token_and_one_call(page) -> None:
    page.click("#open-settings")
    page.fill("#max_tokens", "1")
    page.keyboard.press("Escape")
    assert page.text_content("#summary").endswith(" 1 token")
    send(page)
    assert page.text_content(".answer .numbers").startswith("1 token \u00b7 ")
    assert page.text_content("#news") == "The answer is complete: 1 token."
    until(page, "[...document.querySelectorAll('#meters .tick')].some(tick => tick.textContent === '1 call')")
    page.click("text=Compare with plain decoding")
    until(page, "document.querySelector('#close-compare').textContent === 'Close'")
    assert page.text_content("#rate-plain") == page.text_content("#rate-drafted") == "1 token"
    assert not re.findall(r"\b1 (?:tokens|calls|steps)\b", page.inner_text("body"))


def test_a_second_message_empties_tree_and_sentence_together(page) -> None:
    waiting = page.text_content("#tree-words")
    send(page, "bushy")
    assert page.text_content("#tree-words") != waiting and page.is_visible("#whole")
    send(page, "slow", wait=False)
    until(page, "!document.querySelector('#tree-box svg')")
    assert page.text_content("#tree-words") == waiting and page.text_content("#tree-of") == ""
    assert page.locator("#legend li").count() == 0
    assert not page.is_visible("#whole") and not page.is_visible("#tree-details")
    until(page, "document.querySelector('#tree-box svg')")
    assert page.text_content("#tree-words") != waiting
    page.keyboard.press("Escape")


def test_a_refused_message_leaves_the_tree_of_the_answer_before(page) -> None:
    send(page)
    before = page.text_content("#tree-of"), page.text_content("#tree-words")
    send(page, "busy", wait=False)
    alert(page)
    until(page, "document.querySelector('#tree-box svg')")
    assert (page.text_content("#tree-of"), page.text_content("#tree-words")) == before


def test_an_example_is_sent_when_it_is_pressed(page, server) -> None:
    example = page.text_content("#examples button >> nth=1")
    page.click("#examples button >> nth=1")
    page.wait_for_selector(".answer[aria-busy=false]")
    assert last_body(server)["messages"] == [{"role": "user", "content": example}]
    assert page.evaluate("document.activeElement.id") == "prompt" and page.input_value("#prompt") == ""
    page.check("input[value=completion]", force=True)
    page.focus("#examples button >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer[aria-busy=false]")
    assert last_body(server)["prompt"] == "def merge(left, right):\n    "


def test_a_newcomer_sees_what_guessed_words_look_like(page) -> None:
    parts = "['backgroundColor', 'textDecorationLine', 'textDecorationColor']"
    look = f"e => {parts}.map(part => getComputedStyle(e)[part])"
    sample = page.eval_on_selector(".welcome .drafted", look)
    assert "underline" in sample
    send(page)
    assert page.eval_on_selector(".answer .drafted", look) == sample


INSIDE = "(a => a.top >= 0 && a.bottom <= innerHeight)(document.querySelector('{}').getBoundingClientRect())"


def test_a_phone_says_where_the_tree_is_and_leads_there_and_back(open_page: Callable) -> None:
    page = open_page(width=390, height=844, has_touch=True, is_mobile=True)
    assert "below the text" in page.inner_text(".welcome") and "beside" not in page.inner_text(".welcome")
    there, back = "a[href='#figures']", "a[href='#composer']"
    assert page.evaluate(INSIDE.format('a[href="#figures"]')) and not page.evaluate(INSIDE.format("#tree-box"))
    page.tap("#examples button >> nth=0")
    until(page, "document.activeElement.id === 'stop'")  # no keyboard opens
    page.wait_for_selector(".answer[aria-busy=false]")
    page.tap(there)
    until(page, INSIDE.format("#tree-box"))
    page.tap(back)
    until(page, INSIDE.format("#prompt"))
    wide = open_page()
    assert not wide.is_visible(there) and not wide.is_visible(back) and "beside the text" in wide.inner_text(".welcome")


def test_on_a_phone_the_tree_that_is_asked_for_comes_into_view(open_page: Callable) -> None:
    page = open_page(width=390, height=844, has_touch=True, is_mobile=True, reduced_motion="reduce")
    several(page, 2)
    page.tap("text=Show its tree >> nth=1")
    until(page, INSIDE.format("#tree-box"))


@pytest.mark.parametrize("number", range(3))
def test_what_a_number_means_is_told_to_a_key_a_finger_and_a_mouse(open_page: Callable, number: int) -> None:
    button, tip = f".why >> nth={number}", f".tip >> nth={number}"
    ends = "a.left >= 0 && a.top >= 0 && a.right <= innerWidth && a.bottom <= innerHeight"
    within = f"tip => (a => {ends})(tip.getBoundingClientRect())"
    page = open_page()
    assert not page.is_visible(tip) and len(page.text_content(tip)) > 80
    assert page.get_attribute(button, "aria-describedby") == page.get_attribute(tip, "id")
    send(page, "slow", wait=False)
    page.focus(button)
    page.keyboard.press("Enter")
    assert page.is_visible(tip) and page.eval_on_selector(tip, within)
    page.keyboard.press("Escape")
    assert not page.is_visible(tip) and page.is_visible("#stop")  # the answer goes on
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    until(page, f"!document.querySelectorAll('.tip')[{number}].matches(':popover-open')")
    page.focus("#prompt")
    page.hover(button)
    assert page.is_visible(tip)
    page.click(button)
    assert page.is_visible(tip)
    page.mouse.move(1, 1)
    page.mouse.click(1, 1)
    until(page, f"!document.querySelectorAll('.tip')[{number}].matches(':popover-open')")
    phone = open_page(width=390, height=844, has_touch=True, is_mobile=True)
    phone.tap(button)
    assert phone.is_visible(tip) and phone.eval_on_selector(tip, within)
    phone.tap("#target")
    until(phone, f"!document.querySelectorAll('.tip')[{number}].matches(':popover-open')")


CONTRASTS = """() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const found = [];
    for (const one of document.querySelectorAll(':disabled, [aria-disabled=true], .modes input:disabled + span')) {
        if (!one.checkVisibility() || one.matches('.modes input, [type=range], [type=checkbox]')) continue;
        let ground = null, opacity = 1;
        for (let at = one; at; at = at.parentElement) {
            const { backgroundColor, opacity: own } = getComputedStyle(at);
            opacity *= Number(own);
            if (!ground && (numbers(backgroundColor)[3] ?? 1) === 1) ground = numbers(backgroundColor);
        }
        const words = numbers(getComputedStyle(one).webkitTextFillColor);
        const ink = words.map((v, i) => opacity * v + (1 - opacity) * ground[i]);
        const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
        found.push([one.id || one.textContent, (a + 0.05) / (b + 0.05)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_disabled_words_can_be_read(open_page: Callable, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    seen = dict(page.evaluate(CONTRASTS))
    send(page)
    send(page, "slow", wait=False)
    until(page, "document.querySelector('#tree-box svg')")
    seen |= dict(page.evaluate(CONTRASTS))
    page.keyboard.press("Escape")
    page.click("#open-settings")
    page.uncheck("#enabled")
    seen |= dict(page.evaluate(CONTRASTS))
    assert {"latest", "clear", "Completion", "Compare with plain decoding", "earlier", "drafter", "tree"} <= set(seen)
    assert min(seen.values()) >= 3, seen


def test_charts_say_their_numbers(page) -> None:
    send(page)
    assert "depth" in page.locator("#meters .tick").all_text_contents()
    assert "Tokens" in page.evaluate("getComputedStyle(document.querySelector('#legend'), '::before').content")
    labels = page.eval_on_selector_all("#meters svg", "all => all.map(e => e.getAttribute('aria-label'))")
    assert [label.split(":")[0] for label in labels] == ["Tokens per second", "Tokens per call", "Accepted, by depth"]
    assert all(any(c.isdigit() for c in label) for label in labels)
    assert page.locator("#meters .bar").count() == 4
    assert page.locator("#meters path.line").count() == 2


@pytest.mark.parametrize("word", SCRIPTS)
def test_text_of_a_model_stays_text(page, word: str) -> None:
    send(page, word)
    shown = answer(page)
    if word != "nasty":
        assert shown == SCRIPTS[word]
    else:
        assert "<script>window.broken = true</script><img" in shown and "&amp;" in shown
        assert "\u2407bell" in shown and "\u241b[31m" in shown and "\u27e8U+202E\u27e9" in shown
    assert page.evaluate("window.broken") is None
    assert page.locator(".answer script, .answer img, .answer b").count() == 0
    page.fill("#prompt", NASTY)
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector("#turns > :nth-child(4)[aria-busy=false]")
    assert page.evaluate("window.broken") is None


def test_what_is_copied_is_the_text_itself(open_page: Callable) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    send(page, "nasty")
    page.click("text=Copy")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == NASTY


def test_text_ends_at_a_stop_string_although_the_trace_goes_further(page, server) -> None:
    page.click("#open-settings")
    page.fill("#stop_strings", "for memory\n\\n\\n")
    page.click("#close-settings")
    send(page)
    assert last_body(server)["stop"] == ["for memory", "\n\n"]
    assert answer(page) == STORY[: STORY.index("for memory")]


def test_settings_go_into_the_request(page, server) -> None:
    page.click("#open-settings")
    for name, value in {
        "temperature": "0",
        "top_p": "0.9",
        "max_tokens": "40",
        "seed": "7",
        "system": "Be brief.",
    }.items():
        page.fill(f"#{name}", value)
    page.select_option("#drafter", "ngram")
    page.select_option("#verifier", "block")
    page.fill("#tree", "chain")
    page.fill("#max_draft_tokens", "3")
    assert "what followed" in page.text_content("#drafter-meaning")
    page.keyboard.press("Escape")
    send(page)
    body = last_body(server)
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 40,
        "seed": 7,
    }
    assert body["stream_options"] == {"include_usage": True} and body["model"] == "pair-small"
    assert body["speculative"] == {
        "enabled": True,
        "trace": True,
        "drafter": "ngram",
        "verifier": "block",
        "tree": "chain",
        "max_draft_tokens": 3,
    }
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert "maximum" in page.text_content(".answer .numbers")


MORE = {
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "n": 2,
}


def test_more_settings_go_into_the_request(page, server) -> None:
    page.click("#open-settings")
    assert not page.is_visible("#top_k") and "penalties" in page.text_content("#more-set")
    page.click("#more summary")
    for name, value in MORE.items():
        page.fill(f"#{name}", str(value))
    assert not page.is_visible("#form")
    page.select_option("#format", "regex")
    page.fill("#form", "[a-c]+")
    page.fill("#prediction", "What I expect.")
    assert page.text_content("#more-set") == "8 set"
    page.keyboard.press("Escape")
    assert page.text_content("#summary").endswith("8 more")
    send(page, wait=False)
    page.wait_for_selector(".answer[aria-busy=false] >> nth=1")
    body = last_body(server)
    assert {name: body[name] for name in MORE} == MORE
    assert body["response_format"] == {"type": "regex", "regex": "[a-c]+"}
    assert body["prediction"] == {"type": "content", "content": "What I expect."}


def test_nothing_more_is_sent_unless_it_is_set(page, server) -> None:
    send(page)
    assert not {*MORE, "response_format", "prediction"} & set(last_body(server))


def test_a_prediction_is_not_sent_without_drafts(page, server) -> None:
    page.click("#open-settings")
    page.click("#more summary")
    page.fill("#prediction", "What I expect.")
    page.uncheck("#enabled")
    assert page.is_disabled("#prediction")
    page.keyboard.press("Escape")
    send(page)
    assert "prediction" not in last_body(server)


@pytest.mark.parametrize(
    ("kind", "text", "sent"),
    [
        ("json_object", None, {"type": "json_object"}),
        (
            "json_schema",
            '{"type": "object"}',
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        ),
        ("grammar", 'start: "a"', {"type": "grammar", "grammar": 'start: "a"'}),
    ],
)
def test_structured_output_is_asked_for(page, server, kind: str, text: str | None, sent: dict) -> None:
    page.click("#open-settings")
    page.click("#more summary")
    page.select_option("#format", kind)
    if text:
        page.fill("#form", text)
    page.keyboard.press("Escape")
    send(page)
    assert last_body(server)["response_format"] == sent


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Structured output: This field is empty."),
        ("{no", "Structured output: The schema is no JSON: "),
    ],
)
def test_a_schema_that_is_none_is_said_before_it_is_sent(page, server, text: str, said: str) -> None:
    page.click("#open-settings")
    page.click("#more summary")
    page.select_option("#format", "json_schema")
    page.fill("#form", text)
    page.click("#more summary")
    page.keyboard.press("Escape")
    send(page, wait=False)
    assert alert(page).startswith(said)
    page.click("#alert button")
    assert page.evaluate("document.activeElement.id") == "form" and page.get_attribute("#form", "aria-invalid")


def several(page, count: int, text: str = "Tell me.") -> None:
    """Send a prompt for so many answers, and wait for all of them."""
    if not page.is_visible("#n"):
        page.click("#open-settings")
        page.click("#more summary")
    page.fill("#n", str(count))
    page.keyboard.press("Escape")
    send(page, text, wait=False)
    page.wait_for_selector(f".answer[aria-busy=false] >> nth={count - 1}")


def test_several_answers_stand_below_each_other_and_one_is_chosen(page, server) -> None:
    several(page, 3)
    texts = page.eval_on_selector_all(".answer .text", "all => all.map(e => e.textContent)")
    assert texts == [STORY, other_text(STORY, 1), other_text(STORY, 2)]
    assert page.text_content(".answer h3 >> nth=1") == "Answer 2 of 3"
    numbers = [int(line.split()[0]) for line in page.locator(".answer .numbers").all_text_contents()]
    assert numbers[0] > numbers[1] > numbers[2] > 0
    assert page.text_content("#tree-of").startswith("answer 1 \u00b7 step ")
    page.click("text=Show its tree >> nth=1")
    until(page, "document.querySelector('#tree-of').textContent.startsWith('answer 2')")
    pressed = page.eval_on_selector_all("[aria-pressed]:not(#whole)", "all => all.map(e => e.ariaPressed)")
    assert pressed == ["false", "true", "false"]
    legend = page.eval_on_selector_all("#legend b", "all => all.map(e => Number(e.textContent))")
    assert sum(legend) == numbers[1]
    page.click(".answer >> nth=2 >> .drafted >> nth=0")
    until(page, "document.querySelector('#tree-of').textContent.startsWith('answer 3')")
    page.click("text=Show its tree >> nth=1")
    send(page, "And then?", wait=False)
    page.wait_for_selector(".answer[aria-busy=false] >> nth=5")
    told = [message["content"] for message in last_body(server)["messages"]]
    assert told == ["Tell me.", other_text(STORY, 1), "And then?"]


def test_one_of_several_answers_is_compared_with_its_twin(page, server) -> None:
    several(page, 2, "pace")
    page.click("text=Compare with plain decoding >> nth=1")
    page.wait_for_selector("#ratio b")
    assert last_body(server)["n"] == 2
    assert page.text_content("#text-plain") == page.text_content("#text-drafted") == other_text(STORY, 1)
    assert "this is answer 2" in page.text_content("#compare-note")


def test_several_answers_are_stopped_and_refused_together(page) -> None:
    page.click("#open-settings")
    page.click("#more summary")
    page.fill("#n", "2")
    page.keyboard.press("Escape")
    send(page, "slow", wait=False)
    until(page, "document.querySelectorAll('.answer .drafted').length > 4")
    page.click("#stop")
    page.wait_for_selector(".answer[aria-busy=false] >> nth=1")
    assert all("stopped" in line for line in page.locator(".answer .numbers").all_text_contents())
    page.click("#clear")
    send(page, "busy", wait=False)
    assert alert(page) == "The server is busy; try again in 3 s."
    assert page.locator("#turns > *").count() == 0


def test_a_conversation_has_turns_and_is_cleared(page, server) -> None:
    send(page, "One.")
    send(page, "Two.")
    roles = [message["role"] for message in last_body(server)["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert page.locator(".turn").count() == 4
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    send(page, "Three.")
    assert len(last_body(server)["messages"]) == 1


def test_completion_goes_on_with_the_text(page, server) -> None:
    page.check("input[value=completion]", force=True)
    send(page, "Once")
    assert last_body(server)["prompt"] == "Once"
    assert answer(page) == "Once" + STORY
    assert page.input_value("#prompt") == "Once"


def test_stop_ends_the_request_and_keeps_the_text(page) -> None:
    send(page, "slow", wait=False)
    until(page, "document.querySelectorAll('.answer .drafted').length > 1")
    page.click("#stop")
    page.wait_for_selector(".answer[aria-busy=false]")
    text = answer(page)
    assert text and STORY.startswith(text)
    assert "stopped" in page.text_content(".answer .numbers")
    assert page.is_visible("#send") and page.text_content("#alert") == ""
    page.wait_for_timeout(600)
    assert answer(page) == text


def test_an_error_names_its_field_and_leads_to_it(page) -> None:
    page.click("#open-settings")
    page.fill("#temperature", "9")
    page.keyboard.press("Escape")
    send(page, "My words", wait=False)
    assert alert(page) == "Temperature is wrong: it must be between 0 and 2."
    assert page.input_value("#prompt") == "My words" and page.locator(".turn").count() == 0
    page.click("#alert button")
    assert page.evaluate("document.activeElement.id") == "temperature"
    assert page.get_attribute("#temperature", "aria-invalid") == "true"
    page.fill("#temperature", "1")
    page.keyboard.press("Escape")
    send(page, "My words")
    assert page.text_content("#alert") == ""


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("busy", "The server is busy; try again in 3 s."),
        ("unnamed", "Drafter: No drafter of that name."),
        ("locked", "API key: No such key."),
        ("broken", "The worker died."),
        (" ", "Prompt: Write something first."),
    ],
)
def test_errors_are_one_sentence(page, prompt: str, said: str) -> None:
    send(page, prompt, wait=False)
    assert alert(page) == said
    assert page.is_visible("#send")


def test_a_key_is_sent_and_kept_for_the_tab_only(page) -> None:
    page.click("#open-settings")
    page.fill("#key", "right")
    page.keyboard.press("Escape")
    send(page, "locked")
    assert answer(page) == STORY
    assert page.evaluate("[sessionStorage.length, JSON.stringify(localStorage).includes('right')]") == [1, False]


def test_the_page_survives_the_server(open_page: Callable, server) -> None:
    own = type(server)()
    try:
        page = open_page(own.url)
        send(page, "slow", wait=False)
        until(page, "document.querySelectorAll('.answer .drafted').length > 1")
        own.kill()
        assert alert(page).startswith("The server does not answer.")
        assert page.get_attribute("#link", "data-state") == "away" and page.is_disabled("#send")
        assert "broken off" in page.text_content(".answer .numbers")
        page.fill("#prompt", "Written meanwhile")
        own.start()
        page.wait_for_selector("#link[data-state=well]")
        assert page.text_content("#alert") == "" and page.input_value("#prompt") == "Written meanwhile"
        send(page)
        assert answer(page) == STORY
        own.kill()
        page.wait_for_selector("#link[data-state=away]")
    finally:
        own.kill()


def test_comparing_runs_the_same_request_without_drafts(page, server) -> None:
    page.click("#open-settings")
    page.fill("#seed", "5")
    page.fill("#max_tokens", "60")
    page.keyboard.press("Escape")
    send(page)
    drafted = last_body(server)
    page.click("text=Compare with plain decoding")
    page.wait_for_selector("#ratio b")
    plain = last_body(server)
    assert plain.pop("speculative") == {"enabled": False, "trace": True}
    assert drafted.pop("speculative")["enabled"] and plain == drafted
    assert page.text_content("#text-plain") == page.text_content("#text-drafted") == answer(page)
    assert page.locator("#text-drafted .drafted").count() and not page.locator("#text-plain .drafted").count()
    assert float(page.text_content("#ratio b").rstrip("\u00d7")) > 1.2
    clocks = [float(page.text_content(f"#clock-{side}").split()[0]) for side in ("drafted", "plain")]
    assert 0 < clocks[0] < clocks[1]
    assert "Both texts are the same." in page.text_content("#compare-note")
    assert page.locator("#meters path.line.plain").count() == 1
    page.click("#close-compare")
    assert page.is_hidden("#compare")


def test_a_comparison_ends_where_plain_decoding_was_faster(page) -> None:
    """The drafted text is played back at its own pace, also when the plain one is done."""
    page.evaluate(
        """() => {
            const own = window.fetch;
            window.fetch = async (to, init) => {
                const drafts = init?.body && JSON.parse(init.body).speculative.enabled;
                if (drafts) await new Promise(resolve => setTimeout(resolve, 1500));
                return own(to, init);
            };
        }"""
    )
    page.click("#open-settings")
    page.fill("#max_tokens", "8")
    page.keyboard.press("Escape")
    send(page)
    page.click("text=Compare with plain decoding")
    until(page, "document.querySelector('#close-compare').textContent === 'Close'")
    clocks = [float(page.text_content(f"#clock-{side}").split()[0]) for side in ("drafted", "plain")]
    assert clocks[0] > 1.5 > clocks[1] and page.text_content("#text-drafted") == page.text_content("#text-plain")


def test_a_comparison_can_be_stopped(page) -> None:
    send(page, "pace")
    page.click("text=Compare with plain decoding")
    until(page, "document.querySelector('#text-plain').textContent.length > 20")
    page.keyboard.press("Escape")
    until(page, "document.querySelector('#ratio').textContent === 'Stopped.'")
    assert page.is_visible("#send")


def test_everything_works_with_the_keyboard_alone(page) -> None:
    def tab_to(name: str) -> None:
        for _ in range(40):
            if page.evaluate("document.activeElement.id || document.activeElement.textContent") == name:
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline == "solid" or page.evaluate("document.activeElement.id") == "compare"
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"no way to {name}")

    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("slow words")
    tab_to("send")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'stop'")
    until(page, "document.querySelectorAll('.answer .drafted').length > 1")
    page.keyboard.press("Escape")
    until(page, "document.activeElement.id === 'send'")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("Again")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#turns > :last-child[aria-busy=false] .foot button")
    tab_to("step")
    page.keyboard.press("ArrowLeft")
    tab_to("open-settings")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "temperature"
    for _ in range(5):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("40")
    assert page.evaluate("document.activeElement.id") == "top_k" and page.input_value("#top_k") == "40"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"
    tab_to("theme")
    page.keyboard.press("Enter")
    assert page.get_attribute("html", "data-theme") == "light"


@pytest.mark.parametrize("width", [320, 360, 768])
def test_narrow_windows_do_not_scroll_sideways(open_page: Callable, width: int) -> None:
    page = open_page(width=width, height=720, has_touch=True)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0
    send(page, "endless")
    page.click("text=Compare with plain decoding")
    until(page, "!document.querySelector('#ratio').textContent.startsWith('Both run')")
    assert page.evaluate(wide) == 0
    page.click("#open-settings")
    page.click("#more summary")
    page.select_option("#format", "regex")
    assert page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth")
    edges = page.eval_on_selector_all("dialog label", "all => all.map(e => e.getBoundingClientRect().right)")
    assert max(edges) <= width


def test_dark_mode_follows_the_system_and_the_toggle(open_page: Callable) -> None:
    def ground(page) -> int:
        return page.evaluate("parseInt(getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/)[0])")

    page = open_page(color_scheme="dark")
    assert ground(page) < 60
    page.click("#theme")
    assert page.text_content("#theme") == "Theme: light" and ground(page) > 200
    page.reload()
    assert ground(page) > 200
    page.click("#theme")
    page.click("#theme")
    assert page.text_content("#theme") == "Theme: automatic" and ground(page) < 60


def test_reduced_motion_is_respected(open_page: Callable) -> None:
    page = open_page(reduced_motion="reduce")
    send(page, "pace", wait=False)
    page.wait_for_selector(".writing")
    assert page.evaluate("getComputedStyle(document.querySelector('.writing'), '::after').animationName") == "none"
    page.wait_for_selector(".answer .foot button")


def test_two_thousand_tokens_do_not_make_the_page_slow(page) -> None:
    page.evaluate(
        """() => { window.longest = 0; window.all = 0;
        new PerformanceObserver(list => list.getEntries().forEach(e => {
            window.longest = Math.max(window.longest, e.duration); window.all += e.duration;
        })).observe({ type: 'longtask' }); }"""
    )
    send(page, "long", wait=False)
    page.wait_for_selector(".answer[aria-busy=false]", timeout=60_000)
    assert page.text_content(".answer .numbers").startswith("2000 tokens")
    longest, whole = page.evaluate("[window.longest, window.all]")
    assert longest < 400 and whole < 3000, (longest, whole)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page: Callable, axe: str, scheme: str) -> None:
    page = open_page(color_scheme=scheme, bypass_csp=True)
    page.evaluate(axe)

    def violations() -> list[str]:
        found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        return [f"{rule['id']}: {node['html'][:90]}" for rule in found for node in rule["nodes"]]

    assert violations() == []
    send(page)
    page.click("#tree-details summary")
    page.click("#earlier")
    assert violations() == []
    page.click(".why >> nth=1")
    assert page.is_visible(".tip >> nth=1") and violations() == []
    page.keyboard.press("Escape")
    page.click("text=Compare with plain decoding")
    page.wait_for_selector("#ratio b")
    assert violations() == []
    several(page, 2)
    assert violations() == []
    page.click("#open-settings")
    page.select_option("#format", "regex")
    page.fill("#temperature", "9")
    assert page.is_visible("#form") and violations() == []
    page.keyboard.press("Escape")
    send(page, "hi", wait=False)
    alert(page)
    assert violations() == []


def test_where_the_draft_learns_tokens_per_call_are_told_over_time_with_swaps(open_page: Callable, server) -> None:
    """Of all texts of the server; where none was written in the last minute there is no number."""
    told = iter([("NaN", 0), (2.0, 0), (2.1, 0), (2.6, 3), (2.7, 3)])

    def metrics(route) -> None:
        call, version = next(told, (2.2, 0))
        rows = [("tokens_per_call", call), ("learn_version", float(version)), ("learn_version_total", 9.0)]
        lines = ["# TYPE polydraft:tokens_per_call gauge"]
        lines += [f'polydraft:{name}{{model_name="a}} b"}} {value}' for name, value in rows]
        route.fulfill(body="\n".join(lines) + "\n", content_type="text/plain")

    def watch(page) -> None:
        with urllib.request.urlopen(server.url + "polydraft/options") as found:
            offer = {**json.load(found), "learns": True}
        page.clock.install()
        page.route("**/metrics", metrics)
        page.route("**/polydraft/options", lambda route: route.fulfill(json=offer))

    page = open_page(watch=watch)
    assert page.locator(".meter").count() == 3
    later = "changed at minute 0.3 to version 3, minute 0.4 to version 0"
    for number, (said, swaps) in enumerate(
        [
            ("\u2013; version 0 of the draft", 0),
            ("2.00; version 0 of the draft", 0),
            ("2.10; version 0 of the draft", 0),
            ("2.60; version 3 of the draft; changed at minute 0.3 to version 3", 1),
            ("2.70; version 3 of the draft; changed at minute 0.3 to version 3", 1),
            (f"2.20; version 0 of the draft; {later}", 2),
        ]
    ):
        page.clock.run_for(5000)  # then the page asks, and draws a little later
        seen = "document.querySelector('.meter:nth-child(4) svg')?.getAttribute('aria-label')"
        for _ in range(100):
            page.wait_for_timeout(20)
            page.clock.run_for(10)
            if page.evaluate(seen) == f"Tokens per call over time: {said}":
                break
        assert page.evaluate(seen) == f"Tokens per call over time: {said}", number
        assert page.locator(".meter:nth-child(4) path.mark").count() == swaps
    assert page.locator(".meter:nth-child(4) .name").all_text_contents() == ["plain", "3", "version 0"]
