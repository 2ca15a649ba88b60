"""What the fake server writes."""

STORY = (
    "A language model writes one token at a time, and each token costs a pass through all of its weights. On most "
    "machines such a pass waits for memory, not for arithmetic, so that scoring eight tokens takes hardly longer than "
    "scoring one.\n\nThat leaves room to guess. A small drafter, which may be wrong, proposes a few continuations as "
    "a tree. The target scores the whole tree in one pass, and a verifier walks down from the root: it keeps a guess "
    "as often as the target would have said it, and where it stops, the target's own token follows. What comes out "
    "has exactly the target's distribution. Only the waiting is shorter.\n\n    def walk(tree, target):\n        "
    "node = tree.root\n        while node.children:\n            node = accept(node, target)\n        return node.path"
)
NASTY = (
    "<script>window.broken = true</script><img src=x onerror='window.broken = true'> <b>bold?</b> \x07bell \x1b[31mred "
    "\u202egnirts\u202c end&amp;"
)
SCRIPTS = {
    "nasty": NASTY,
    "endless": "Endless" * 40,
    "unicode": "Caf\u00e9 \U0001f600\U0001f680 na\u00efve \u65e5\u672c\u8a9e text.",
}
"""What is written where the prompt contains the word; else the story, "long" for two thousand tokens of it."""


def other_text(text: str, number: int) -> str:
    """The text of a later choice."""
    return f"Choice {number + 1}: {text[: len(text) // (number + 2)]}"
