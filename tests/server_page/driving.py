"""What tests of the page do again and again."""

import time


def until(page, expression: str, seconds: float = 20) -> None:
    """Wait for an expression to hold; Playwright's own waiting needs `eval`, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(30)


def send(page, text: str = "Tell me.", wait: bool = True) -> None:
    """Send a prompt, and wait for its answer unless told otherwise."""
    page.fill("#prompt", text)
    page.press("#prompt", "Control+Enter")
    if wait:
        page.wait_for_selector("#turns > :last-child[aria-busy=false] .foot button")
        # the last step is drawn a little later
        page.wait_for_selector("#tree-box:not([aria-busy=true])", state="attached")


def answer(page) -> str:
    """The last answer's text."""
    return page.text_content("#turns > :last-child .text")


def alert(page) -> str:
    """What the page complains of."""
    page.wait_for_selector("#alert:not(:empty)")
    return page.text_content("#alert span")
