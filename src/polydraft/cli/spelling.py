"""From token ids to text as it comes."""

from collections.abc import Callable

from polydraft.models import Pair


class StreamDecoder:
    """Decode tokens one by one; bytes of an unfinished character wait for the rest of it.

    Text is decoded in a window that starts before the last printed token, because a token's text can depend on the
    one before it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.start = 0
        self.printed = 0

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; may be empty."""
        self.ids.append(token)
        before = self.decode(self.ids[self.start : self.printed])
        now = self.decode(self.ids[self.start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self.start, self.printed = self.printed, len(self.ids)
        return now[len(before) :]

    def rest(self) -> str:
        """Return what is left at the end of the text, complete or not."""
        before = self.decode(self.ids[self.start : self.printed])
        return self.decode(self.ids[self.start :])[len(before) :]


def text_of(pair: Pair) -> Callable[[list[int]], str]:
    """Return the function that turns token ids into text without special tokens."""
    return lambda ids: str(pair.tokenizer.decode(ids, skip_special_tokens=True))
