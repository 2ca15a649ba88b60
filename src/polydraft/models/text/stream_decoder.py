"""From tokens to text, piece by piece."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from polydraft.errors import InvalidParameter, is_whole, shown


class StopFilter:
    """Let a text pass up to the first stop string.

    The first is the one that is complete first; of two that end with the same character it is the longer one. So what
    passes does not depend on how the text was cut into pieces.

    Args:
        stop: the strings; none let everything pass at once.
        included: whether the stop string itself passes too.
    """

    def __init__(self, stop: Sequence[str], *, included: bool) -> None:
        self.stop = tuple(stop)
        self.included = included
        self.found: str | None = None
        self._held = ""

    def add(self, text: str, *, looks: bool = True) -> str:
        """Return the text that is certain to come before a stop string; nothing after one.

        Args:
            text: what is new.
            looks: whether a stop string may end with it; one that may not is text like any other.
        """
        if self.found is not None:
            return ""
        held, text = len(self._held), self._held + text
        found = ((text.find(one, max(0, held + 1 - len(one))), one) for one in self.stop if looks)
        ends = [(place + len(one), place, one) for place, one in found if place >= 0]
        if ends:
            end, place, self.found = min(ends)
            self._held = ""
            return text[: end if self.included else place]
        most = min(len(text), max(map(len, self.stop), default=1) - 1)
        kept = next((n for n in range(most, 0, -1) if any(one.startswith(text[-n:]) for one in self.stop)), 0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """Return what was held back, and no longer is."""
        text, self._held = self._held, ""
        return text


def checked_stop(stop: object) -> tuple[str, ...]:
    """Return stop strings, of which one alone may be given, as a tuple.

    Raises:
        InvalidParameter: they are something else, or one is empty.
    """
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Sequence) or any(not isinstance(one, str) or not one for one in given):
        raise InvalidParameter(f"stop must be texts of at least one character, but is {shown(stop)}.")
    return tuple(given)


PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
"""Bytes that byte-level vocabularies write as themselves; the others are written from U+0100 on, in order."""


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token: of its text, or, if that is broken, those that the vocabulary says.

    Byte-level vocabularies (GPT-2's) write every byte as a letter, and others have tokens such as `<0xE2>` for single
    bytes. Of other tokenizers the bytes of a broken text are not known, and are those of U+FFFD.

    Args:
        tokenizer: the model's.
        token: the token.
    """
    text = text_of(tokenizer, [token], False)
    name = tokenizer.convert_ids_to_tokens(token) if BROKEN in text else None
    if not isinstance(name, str):
        return text.encode("utf-8", "replace")
    alone = re.fullmatch("<0x([0-9A-F]{2})>", name)
    if alone:
        return bytes([int(alone[1], 16)])
    letters = _letters()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    return text.encode("utf-8", "replace")


@cache
def _letters() -> dict[str, int]:
    own = [byte for some in PRINTABLE for byte in some]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BROKEN = "\ufffd"
MOST_HELD = 3
"""Bytes of an unfinished character at most, and so broken characters: some decoders write one for each byte."""
MOST_CONTEXT, MOST_WAITING = 8, 16


class StreamDecoder:
    """Turn tokens into text piece by piece, without broken characters.

    The pieces and the rest together are `tokenizer.decode` of all tokens, without special ones unless they are asked
    for. Bytes of an unfinished character wait for the others; bytes that can be no character are given as U+FFFD, like
    `decode` does. Only tokenizers with tokens such as `<0xE2>` for single bytes are an exception: once a character of
    theirs was given, it is not taken back when an invalid byte follows it.

    The text of a token is found by decoding it behind a few tokens that come before it. So the work per token does not
    grow with the text.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings at which the text ends. What may be the beginning of one waits.
        skip_special_tokens: whether to leave special tokens out.
        include_stop: whether the stop string belongs to the text, as with Hugging Face's `stop_strings`; what follows
            it in its last token does not.
        least: the text of so many tokens completes no stop string.
        shown: special tokens that have a text although the others are left out.

    Attributes:
        stopped: the stop string that ended the text; None as long as none has.
        begins: where in the text each token's own begins, counted as if no stop string were cut off. A token that adds
            nothing begins where an unfinished character before it does, or else the next one. What lies behind the text
            that was given may still move back.

    Raises:
        InvalidParameter: something else than a tokenizer, or stop strings that are empty or no texts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: str | Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        least: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self.tokenizer = _checked(tokenizer)
        self.skip_special_tokens = skip_special_tokens and not shown  # those that are left out never come to `decode`
        self._stops = StopFilter(checked_stop(stop), included=include_stop)
        self._bytes = _byte_tokens(tokenizer)
        self._skipped = _special_tokens(tokenizer) - shown if skip_special_tokens else frozenset[int]()
        self._left = least  # tokens until stop strings are looked for
        self._context: list[int] = []  # tokens that were given, behind which new ones are decoded
        self._solid: list[int] = []  # the same without tokens of single bytes
        self._waiting: list[int] = []  # tokens of which something was not given
        self._given = 0  # characters of their text that were
        self.begins: list[int] = []
        self._fresh, self._before = "", 0  # the text of the waiting tokens, and the characters before it

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def add(self, tokens: int | Sequence[int] | Tensor) -> str:
        """Return the text that is certain with these tokens; may be empty, and is after a stop string.

        Raises:
            InvalidParameter: something else than token ids.
        """
        text = ""
        for token in _listed(tokens):
            if self.stopped is not None:
                return text
            looks, self._left = not self._left, max(0, self._left - 1)
            if token in self._skipped:
                self._note(self._fresh)
            else:
                text += self._stops.add(self._certain(token), looks=looks)
        return text

    def rest(self) -> str:
        """Return what is left at the end of the tokens, complete or not; nothing after a stop string."""
        if self.stopped is not None:
            return ""
        text = self._stops.add(self._fresh[self._given :], looks=not self._left)
        self._advance()
        return text + self._stops.rest()

    def _certain(self, token: int) -> str:
        """Return the text that no later token can change."""
        if not self._waiting and token in self._bytes:
            self._context = self._solid  # bytes are decoded in runs, and what was given must not belong to this one
        self._waiting.append(token)
        fresh = self._behind(self._context, self._waiting)
        self._note(fresh)
        held = min(len(fresh) - len(fresh.rstrip(BROKEN)), MOST_HELD)
        certain = len(fresh) - held
        text = fresh[self._given : certain]
        self._given = max(self._given, certain)
        if fresh and not held:
            self._advance()
        elif len(self._waiting) > MOST_WAITING:
            self._shorten(fresh[self._given :])
        return text

    def _note(self, fresh: str) -> None:
        """Take the text that the waiting tokens have with a new one, and note where that one begins.

        Where the text changes, a character was unfinished, and no token begins behind the first change.
        """
        same = _common(self._fresh, fresh)
        goes_on = fresh == self._fresh and fresh.endswith(BROKEN)
        self.begins.append(self._before + len(self._fresh) - goes_on)
        for place in range(len(self.begins) - 1, -1, -1):
            if self.begins[place] <= self._before + same:
                break
            self.begins[place] = self._before + same
        self._fresh = fresh

    def _behind(self, context: list[int], tokens: list[int]) -> str:
        before, now = (text_of(self.tokenizer, ids, self.skip_special_tokens) for ids in (context, context + tokens))
        return now[_common(before, now) :]

    def _advance(self) -> None:
        """Make the waiting tokens, which were given, the context of the next ones."""
        if not self._waiting:
            return
        solid = [token for token in self._waiting if token not in self._bytes][-MOST_CONTEXT:]
        if text_of(self.tokenizer, solid, self.skip_special_tokens):
            self._solid = solid
        self._before, self._fresh = self._before + len(self._fresh), ""
        self._context, self._waiting, self._given = self._waiting[-MOST_CONTEXT:], [], 0

    def _shorten(self, left: str) -> None:
        """Let fewer tokens wait, of which the same text is left: endless invalid bytes, or tokens without text."""
        if not left:
            self._waiting = self._waiting[-MOST_HELD:]
            return
        everything = self._context + self._waiting
        for count in range(MOST_HELD, MOST_WAITING):
            context, waiting = everything[-count - MOST_CONTEXT : -count], everything[-count:]
            fresh = self._behind(context, waiting)
            if len(fresh) >= len(left) and fresh.endswith(left):
                self._before += self._given + len(left) - len(fresh)
                self._fresh, self._given = fresh, len(fresh) - len(left)
                self._context, self._waiting = context, waiting
                return


def _common(one: str, other: str) -> int:
    return next((n for n in range(min(len(one), len(other)), 0, -1) if one[:n] == other[:n]), 0)


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Return the text of tokens, as `StreamDecoder` does, with spaces as the tokens have them."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


def _checked(tokenizer: object) -> PreTrainedTokenizerBase:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InvalidParameter(f"StreamDecoder needs a tokenizer, such as pair.tokenizer, not {shown(tokenizer)}.")
    return tokenizer


def _listed(tokens: object) -> list[int]:
    given: object = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    found: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not all(is_whole(one) and one >= 0 for one in found):
        raise InvalidParameter(f"A token id is a whole number of at least 0, but {shown(tokens)} was added.")
    return [int(one) for one in found]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of special tokens that `decode` leaves out."""
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return frozenset(index for index in special if not text_of(tokenizer, [index]))


def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of tokens that stand for one byte each, such as <0xE2>."""
    names = [f"<0x{value:02X}>" for value in range(256)]
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    return frozenset(
        index
        for name, index in zip(names, ids, strict=True)
        if isinstance(index, int) and tokenizer.convert_ids_to_tokens(index) == name
    )
