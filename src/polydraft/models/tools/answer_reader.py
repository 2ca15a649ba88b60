"""From an answer's text, as it comes, to its events: what is said, what is thought, and calls of tools."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polydraft.models.text.marks import BLANKS, Thinking, find_mark
from polydraft.models.tools.call_formats import ToolFormat
from polydraft.models.tools.call_readers import read_call
from polydraft.models.tools.tape import BrokenCallError, Put, Reading, Tape, parsed

GAP = 2
"""So many line breaks behind the end of reasoning belong to its mark."""
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""What ends a message of harmony."""
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


@dataclass(frozen=True)
class AnswerEvent:
    """A piece of an answer.

    Args:
        kind: "content" and "reasoning" (a piece of text), "call" (one begins), "arguments" (a piece of their JSON),
            "end" (a call is over).
        text: the piece; of a call that begins, the function's name.
        index: the call's number.
        call: of a call that begins, its id.
        sound: of a call that is over, whether its arguments are a JSON object, and its name that of a tool.
    """

    kind: Literal["content", "reasoning", "call", "arguments", "end"]
    text: str = ""
    index: int = 0
    call: str = ""
    sound: bool = True


class AnswerReader:
    """Turn pieces of an answer into events; the same ones, wherever the pieces part, but for where texts part.

    Problem: marks, names and arguments may be cut anywhere, and several tokens may come at once.
    Rule: what may be the beginning of a mark waits for what follows. What begins with a mark and is no call is content,
    with its mark, unless its name was told already: then the call ends, unsound. Blanks before a call and behind it are
    nobody's. Reasoning stands before everything else.

    Args:
        tool_format: how calls are written; None where none are read.
        thinking: the marks of reasoning; None where none is read.
        begun: whether the answer goes on with reasoning whose mark stands in the prompt.
        tools: the schemas of the arguments of tools, by the tools' names.
        name_call: returns the id of a call from its number and the function's name.

    Attributes:
        thinks: whether what comes next is reasoning, as far as is known.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        thinking: Thinking | None = None,
        *,
        begun: bool = False,
        tools: Mapping[str, Any] | None = None,
        name_call: Callable[[int, str], str] = lambda index, name: f"call_{index}",
    ) -> None:
        self.thinks = begun and thinking is not None
        self._format, self._thinking, self._tools, self._name_call = tool_format, thinking, tools or {}, name_call
        self._tape, self._events, self._cut = Tape(), list[AnswerEvent](), False
        self._calls, self._name = 0, ""  # how many have begun, and the name of the one that is being written
        self._arguments = list[str]()
        harmony = tool_format is not None and tool_format.kind == "harmony"
        framed = thinking is not None and MESSAGE in thinking.begin
        self._steps = self._messages() if harmony or framed else self._answer()

    def feed(self, text: str) -> list[AnswerEvent]:
        """Return the events of a piece that follows those before it."""
        self._tape.text += text
        return self._run() if text else []

    def finish(self, *, cut: bool = False) -> list[AnswerEvent]:
        """Return the last events: nothing follows.

        Args:
            cut: whether the answer was cut off, as by `max_tokens`. Then the beginning of a mark, and a call that has
                no name yet, are parts of what was not written, and no content. An answer that may be a call as a whole
                (`anchored`) is told as it is.
        """
        self._tape.closed, self._cut = True, cut
        return self._run()

    def begin(self, name: str) -> None:
        """Begin a call, as a `CallSink`."""
        own = self._format
        if own is not None and own.anchored and self._tools and name not in self._tools:
            raise BrokenCallError
        self._name, self._arguments = name, []
        self._events.append(AnswerEvent("call", name, self._calls, self._name_call(self._calls, name)))
        self._calls += 1

    def put(self, text: str) -> None:
        """Take a piece of arguments, as a `CallSink`."""
        self._arguments.append(text)
        self._events.append(AnswerEvent("arguments", text, self._calls - 1))

    def _run(self) -> list[AnswerEvent]:
        next(self._steps, None)
        found, self._events = self._events, []
        return found

    def _tell(self, kind: Literal["content", "reasoning"]) -> Put:
        def put(text: str) -> None:
            if text:
                self._events.append(AnswerEvent(kind, text))

        return put

    def _end(self, *, whole: bool) -> None:
        """End the call that is being written."""
        try:
            sound = whole and isinstance(parsed("".join(self._arguments)), dict)
        except BrokenCallError:
            sound = False
        known = not self._tools or self._name in self._tools
        self._events.append(AnswerEvent("end", index=self._calls - 1, sound=sound and known))
        self._name = ""

    def _pass_on(self, marks: Sequence[str], put: Put) -> Reading:
        """Hand text on up to the first of these marks, behind which it goes, and return the mark.

        Blanks before a mark are left out; without a mark, None is returned at the end.
        """
        tape = self._tape
        while True:
            tape.forget()
            place, mark = find_mark(tape.text, marks)
            sure = tape.text[:place].rstrip(BLANKS) if marks else tape.text
            put(sure)
            if mark is not None:
                tape.at = place
                tape.forget()
                tape.at = len(mark)
                return mark
            tape.at = len(sure)
            if tape.closed:
                if not (self._cut and place < len(tape.text)):
                    put(tape.left)
                tape.at = len(tape.text)
                return None
            yield

    def _answer(self) -> Reading:
        tape, own = self._tape, self._format
        if self._thinking is not None:
            yield from self._thoughts(self._thinking)
        if own is None:
            yield from self._pass_on((), self._tell("content"))
            return
        if own.anchored:
            yield from tape.skip_blanks()
            begun = tape.at
            if (yield from tape.starts(own.mark)):
                tape.at = begun
                tape.forget()
                yield from self._section(own)
            else:
                tape.at = 0
            yield from self._pass_on((), self._tell("content"))
            return
        while (yield from self._pass_on((own.mark,), self._tell("content"))):
            tape.at = 0
            yield from self._section(own)

    def _thoughts(self, thinking: Thinking) -> Reading:
        tape = self._tape
        if not self.thinks:
            yield from tape.skip_blanks()
            if not (yield from tape.starts(thinking.begin)):
                dropped = self._cut and tape.left and thinking.begin.startswith(tape.left)
                tape.at = len(tape.text) if dropped else 0
                return
            self.thinks = True
        yield from tape.skip_blanks()
        ended = yield from self._pass_on((thinking.end,), self._tell("reasoning"))
        self.thinks = False
        for _ in range(GAP if ended else 0):
            if not (yield from tape.starts("\n")):
                break
        tape.forget()

    def _section(self, own: ToolFormat) -> Reading:
        """Read calls from the mark on, with which the tape begins; what is none is content."""
        tape, before, end = self._tape, self._calls, own.end
        tape.kept = True
        try:
            listed = own.kind == "json" and own.begin.endswith("[")
            yield from tape.expect(own.begin[:-1] if listed else own.begin)
            if listed and not (yield from tape.has("[")):
                end = end.removeprefix("]")  # an object where a list of them could stand
            while True:
                yield from tape.expect(own.call_begin)
                yield from read_call(tape, own, self, self._tools)
                self._end(whole=True)
                yield from tape.pass_end(own.call_end)
                tape.forget()
                tape.kept = True
                if not (yield from self._another(own)):
                    break
            yield from tape.pass_end(end)
            if self._cut:
                yield from tape.pass_end(own.call_begin)
            yield from tape.skip_blanks()
        except BrokenCallError:
            told = bool(self._name)
            if told:
                self._end(whole=False)
            if tape.closed and (told or (self._cut and not own.anchored)):
                tape.at = len(tape.text)  # the rest is a part of the call
            elif not told and (self._calls > before or own.anchored):
                tape.at = 0
            elif not told:
                self._tell("content")(own.mark)
                tape.at = len(own.mark)
        tape.forget()

    def _another(self, own: ToolFormat) -> Reading:
        """Tell whether one more call follows in a section, and go to where it begins."""
        tape = self._tape
        if own.between.strip():
            return (yield from tape.has(own.between))
        yield from tape.skip_blanks()
        if own.end and not own.call_begin:
            end = own.end.strip()
            found = yield from tape.starts(end)
            tape.at -= len(end) if found else 0
            return bool(tape.left) and not found
        if not own.call_begin:
            return tape.left.startswith("{")
        begun = tape.at
        found = yield from tape.has(own.call_begin)
        tape.at = begun
        return found

    def _messages(self) -> Reading:
        """Read messages of harmony, whose headers tell what they are; a text without a header is content."""
        tape = self._tape
        yield from tape.skip_blanks()
        framed = (yield from tape.starts("<|")) or (yield from tape.starts("to="))
        tape.at = 0
        if not framed:
            yield from self._pass_on(ENDS, self._tell("content"))
        while True:
            tape.forget()
            try:
                header = yield from tape.until((MESSAGE,))
            except BrokenCallError:
                return
            found = RECIPIENT.search(header)
            tape.forget()
            if found and self._format is not None:
                yield from self._addressed(found[1])
                continue
            self.thinks = "analysis" in header
            yield from self._pass_on(ENDS, self._tell("reasoning" if self.thinks else "content"))
            self.thinks = False

    def _addressed(self, name: str) -> Reading:
        tape, self._tape.kept = self._tape, False
        self.begin(name)
        try:
            yield from tape.value(self.put)
            self._end(whole=True)
            yield from tape.until(ENDS)
        except BrokenCallError:
            if self._name:
                self._end(whole=False)
            tape.at = len(tape.text)
