"""Where a grammar that begins inside a text is, after any path of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polydraft.errors import InvalidParameter
from polydraft.models.grammar.grammar import Compilable, Vocabulary
from polydraft.models.grammar.late import GAP, GrammarBehind, LateGrammar, literal
from polydraft.models.grammar.walk import SIZE, AnyWalk, State, Walk, common_start
from polydraft.models.text.marks import BLANKS, begins_with, find_mark

OPENING, THINKING, WAITING, BEGUN, FREE, OUTSIDE = range(6)
"""Reasoning may begin; it goes on; the mark may come; the grammar has begun; it never will; a path that cannot be."""


class LatePlace(NamedTuple):
    """Where a path is.

    Args:
        stage: one of those above.
        held: the end of the text that may be the beginning of a mark.
        thoughts: tokens of reasoning.
        at: how many tokens of the path stand before the grammar.
        grammar: which grammar has begun.
        rest: what stands behind the mark in the token that completed it.
    """

    stage: int
    held: str = ""
    thoughts: int = 0
    at: int = 0
    grammar: Compilable | None = None
    rest: str = ""


class LateWalk:
    """Answer where a grammar that begins later is, after any path; the answers depend on the path alone.

    The places of the last path are kept: the next one begins where it parts from it. From where the grammar begins a
    `Walk` of its own goes on, one for each grammar and text behind the mark.

    Args:
        late: the grammar.
        vocabulary: the tokenizer.
        eos: end-of-text ids.
    """

    def __init__(self, late: LateGrammar, vocabulary: Vocabulary, eos: Sequence[int]) -> None:
        self.failure = ""
        self._late, self._vocabulary, self._eos = late, vocabulary, list(eos)
        self._spelt = vocabulary.spellings(late.seen)
        self._spellers: dict[str, int] | None = None
        thinking = late.thinking
        self._mark = _letters(late.mark)
        self._begin, self._end = ("", "") if thinking is None else (_letters(thinking.begin), _letters(thinking.end))
        self._closing = [] if late.most is None else self._tokens_of(self._end)
        body = late.grammar
        self._after = None if body is None else GrammarBehind(GAP, body)
        begin = "" if thinking is None else thinking.begin
        self._opening = None if body is None else GrammarBehind(self._opening_rules(begin), body)
        self._places, self._path = [self._first()], b""
        self._walks = dict[tuple[Compilable, str], AnyWalk | None]()
        self._states = dict[tuple[int, str], State]()
        self._candidates: list[int] | None = None

    def compile(self) -> None:
        """Compile what may begin.

        Raises:
            InvalidParameter: the grammar allows nothing, or the tokenizer cannot spell the end of reasoning.
        """
        for one in self._grammars():
            self._vocabulary.start(one)
        if self._late.most is not None and any(self._end.startswith(self._end[by:]) for by in range(1, len(self._end))):
            raise InvalidParameter("The end mark of reasoning overlaps itself, so reasoning cannot be bounded.")
        if self._late.most is not None and not self._closing:
            raise InvalidParameter(
                "The tokenizer has no tokens for the end mark of reasoning, so it cannot be bounded."
            )

    def state(self, path: bytes) -> State | None:
        """Return where the grammar is after a path, the bytes of its tokens as int64; None outside of it."""
        self.failure = ""
        place = self._led(path)
        if place.stage == OUTSIDE:
            return None
        if place.stage == BEGUN and place.grammar is not None:
            walk = self._walk(place.grammar, place.rest)
            if walk is None:
                return None
            found, self.failure = walk.state(path[SIZE * place.at :]), walk.failure
            return found
        most = self._late.most
        if place.stage == THINKING and most is not None and place.thoughts >= most:
            return self._closed(place.thoughts - most)
        found = self._before(place)
        if place.stage != OPENING or self._mark or self._opening is None:
            return found
        walk = self._walk(self._opening, "")
        own = None if walk is None else walk.state(path)
        return None if own is None else State(own.bits | found.bits, own.ends, own.goes_on)

    def _first(self) -> LatePlace:
        late = self._late
        if late.thinking is not None:
            return LatePlace(THINKING if late.begun else OPENING)
        return self._waited("", -1) if late.grammar is None or late.mark else LatePlace(BEGUN, grammar=late.grammar)

    def _grammars(self) -> list[Compilable]:
        """Return the grammars that may begin."""
        late = self._late
        if late.grammar is None:
            return []
        if late.mark or late.thinking is None:
            return [late.grammar]
        both = [self._after] if late.begun else [self._after, self._opening]
        return [one for one in both if one is not None]

    def _led(self, path: bytes) -> LatePlace:
        """Return the place of a path."""
        common = common_start(self._path, path)
        places = self._places[: common + 1]
        for number, token in enumerate(np.frombuffer(path[SIZE * common :], np.int64).tolist(), common):
            places.append(self._next(places[-1], number, token))
        self._places, self._path = places, path
        return places[-1]

    def _next(self, place: LatePlace, number: int, token: int) -> LatePlace:
        """Return the place behind a token, which is the path's with this number."""
        if place.stage in (BEGUN, FREE, OUTSIDE):
            return place
        text = place.held + (self._spelt[token] if 0 <= token < len(self._spelt) else "")
        if place.stage == WAITING:
            return self._waited(text, number)
        if place.stage == THINKING:
            over = -1 if self._late.most is None else place.thoughts - self._late.most
            if over >= 0 and self._closing[over : over + 1] != [token]:
                return LatePlace(OUTSIDE)
            return self._thought(text, place.thoughts + 1, number)
        bare = text.lstrip(BLANKS)
        begins = begins_with(bare, self._begin)
        if begins is None:
            return LatePlace(OPENING, bare)
        if begins:
            return self._thought(bare[len(self._begin) :], 0, number)
        if self._mark or self._opening is None:
            return self._waited(bare, number)
        return LatePlace(BEGUN, grammar=self._opening)

    def _thought(self, text: str, count: int, number: int) -> LatePlace:
        place, mark = find_mark(text, (self._end,))
        if mark is None:
            return LatePlace(THINKING, text[place:], count)
        rest = text[place + len(mark) :]
        if self._mark or self._after is None:
            return self._waited(rest, number)
        return LatePlace(BEGUN, at=number + 1, grammar=self._after, rest=rest)

    def _waited(self, text: str, number: int) -> LatePlace:
        if not self._mark:
            return LatePlace(FREE)
        if not self._late.anchored:
            place, mark = find_mark(text, (self._mark,))
            found, rest = mark is not None, text[place + len(self._mark) :]
            return self._marked(number, rest) if found else LatePlace(WAITING, text[place:])
        bare = text.lstrip(BLANKS)
        begins = begins_with(bare, self._mark)
        if begins:
            return self._marked(number, bare[len(self._mark) :])
        return LatePlace(FREE) if begins is False else LatePlace(WAITING, bare)

    def _marked(self, number: int, rest: str) -> LatePlace:
        return LatePlace(BEGUN, at=number + 1, grammar=self._late.grammar, rest=rest)

    def _before(self, place: LatePlace) -> State:
        """Return the state of a place before the grammar: all is free but tokens behind whose mark it forbids what is.

        A text whose grammar has no mark of its own cannot end there.
        """
        key = place.stage, place.held
        if key not in self._states:
            bits = np.zeros((self._vocabulary.tokens.vocab_size + 31) // 32 * 4, np.uint8)
            wrong = [] if place.stage == FREE else [one for one in self._closers() if not self._goes_on(place, one)]
            ends = bool(self._mark) or self._late.grammar is None
            for token in [*wrong, *(() if ends else self._eos)]:
                bits[token >> 3] |= 1 << (token & 7)
            self._states[key] = State(bits, ends, goes_on=True, free=not bits.any())
        return self._states[key]

    def _closed(self, number: int) -> State:
        """Return the state in which the end mark's token with this number is all that is allowed."""
        bits = np.full((self._vocabulary.tokens.vocab_size + 31) // 32 * 4, 0xFF, np.uint8)
        token = self._closing[number]
        bits[token >> 3] &= 0xFF ^ (1 << (token & 7))
        return State(bits, ends=False, goes_on=True)

    def _closers(self) -> list[int]:
        """Return the tokens that may complete a mark."""
        if self._candidates is None:
            last = {mark[-1] for mark in (self._begin, self._end, self._mark) if mark}
            self._candidates = [token for token, text in enumerate(self._spelt) if not last.isdisjoint(text)]
        return self._candidates

    def _goes_on(self, place: LatePlace, token: int) -> bool:
        """Tell whether a token, if it completes a mark, holds nothing behind it that the grammar forbids."""
        found = self._next(place, 0, token)
        if found.stage != BEGUN or not found.rest or found.grammar is None:
            return True
        return self._walk(found.grammar, found.rest) is not None

    def _walk(self, grammar: Compilable, rest: str) -> AnyWalk | None:
        """Return a walk from behind a text on, with which the grammar begins; None if it does not."""
        if (grammar, rest) not in self._walks:
            start, tokens = self._vocabulary.start(grammar), self._tokens_of(rest)
            if rest:
                start = start.deep_copy()
            taken = len("".join(self._spelt[one] for one in tokens)) == len(rest) and (
                not rest or start.try_consume_tokens(tokens) == len(tokens)
            )
            self._walks[grammar, rest] = Walk(start, self._vocabulary.end) if taken and not start.is_error() else None
        return self._walks[grammar, rest]

    def _tokens_of(self, text: str) -> list[int]:
        """Return tokens that spell a text, as the tokenizer would where it does; none if no tokens do."""
        tokens: list[int] = self._vocabulary.tokens.tokenize_bytes(text.encode("latin-1"), parse_special=True)
        if "".join(self._spelt[one] for one in tokens) == text:
            return tokens
        if self._spellers is None:
            special = self._vocabulary.tokens.is_special_token
            self._spellers = {one: token for token, one in enumerate(self._spelt) if one and not special(token)}
        ways: list[list[int] | None] = [[]]  # for every beginning of the text, some tokens that spell it
        for end in range(1, len(text) + 1):
            found = ((ways[begin], self._spellers.get(text[begin:end])) for begin in range(end))
            ways.append(next(([*way, one] for way, one in found if way is not None and one is not None), None))
        return ways[-1] or []

    def _opening_rules(self, begin: str) -> str:
        """Return the rules of a text that begins with reasoning, of which this is the first mark, or is the body."""
        special = self._vocabulary.tokens.is_special_token
        ids = {name: self._spelt.index(_letters(name)) for name in self._late.seen if _letters(name) in self._spelt}
        mark = literal(begin, {name: token for name, token in ids.items() if special(token)})
        return f"start: {mark} THOUGHT? | @body\nTHOUGHT: /(?s:.+)/\n"


def _letters(text: str) -> str:
    """Return the bytes of a text as letters."""
    return text.encode().decode("latin-1")
