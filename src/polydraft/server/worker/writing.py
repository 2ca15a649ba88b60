"""The texts in progress: requests join between steps, and everything a step brings is said."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydraft.drafters import drafters_in, owned_models
from polydraft.engine import Method, Observer, Request, RunningBatch, RunningStep, Statistics
from polydraft.engine.choices import Choices, chosen_method
from polydraft.errors import InvalidParameter, PolydraftError, RankLost
from polydraft.models import check_memory
from polydraft.planning import PLANNERS
from polydraft.probs import SamplingParams
from polydraft.server.worker.answer_text import AnswerText, Echo, nothing
from polydraft.server.worker.asking import (
    MOST_NODES,
    MOST_RIDERS,
    MethodShelf,
    RequestError,
    TextRequest,
    request_of,
    wanted_of,
)
from polydraft.server.worker.asks import DRAFTING, Ask, Event, Speculation, Unfit, about
from polydraft.server.worker.served import LoadedModels
from polydraft.server.worker.teaching import Teaching

Say = Callable[[Event], None]
ROOM = MOST_NODES + MOST_RIDERS
"""Key slots of a row beside its text: the largest tree, and riders."""
SAMPLING_BY_GREEDY = {True: SamplingParams(temperature=0), False: SamplingParams()}
"""Greedy texts and sampled ones: other drafters and trees suit them, so each kind has a planner of its own."""
EXPECTED_TOKENS = 10_000
"""So many tokens a planner is told to have before it: what it learns serves all texts that will come."""


@dataclass(frozen=True, eq=False)
class _Text:
    """A text in progress: what was wanted, what is told of it, and the method that only it has."""

    wanted: TextRequest
    telling: AnswerText
    own: Method | None = None


class Writing:
    """All texts of a worker; `step` takes a step with those that fit, and says what it brought.

    Attributes:
        rule: the rule of requests that name none, above temperature 0 if it depends on that, and whether all are
            lossless.

    Raises:
        InvalidParameter: a word or tree of the server's own that means nothing or is too large for every text, or a
            batch that does not fit into the memory.
        UnpairedScheme: a drafter, verifier and tree of the server's own that go together for no text.
    """

    def __init__(self, served: LoadedModels, say: Say) -> None:
        settings, target = served.settings, served.target
        self.served, self.say = served, say
        self.shelf = MethodShelf(served)
        plan, none = settings.plan, chosen_method(Choices("none"), target, SamplingParams())
        self._planned = (
            {}
            if plan is None
            else {kind: self.shelf.planned(PLANNERS[plan](), one) for kind, one in SAMPLING_BY_GREEDY.items()}
        )
        usual = self._usual_methods()
        self.rule = {"verifier": usual[-1].verifier.name, "lossless": all(one.verifier.lossless for one in usual)}
        if served.learnt and not self.rule["lossless"]:
            raise InvalidParameter(
                f"--learn is for texts of the target's own law, and {self.rule['verifier']} has another: leave "
                "--verifier or --learn out."
            )
        capacity = served.max_length + ROOM
        models = {id(one): one for own in (*usual, *self._planned.values()) for one in owned_models(own.drafter)}
        check_memory([target, *models.values()], settings.batch_size, capacity)
        self._observer = Observer(target, time=bool(self._planned))
        for method in self._planned.values():
            self._observer.watched(method)  # all planners are known before the first step
        self._statistics, self._known = Statistics(), dict[bool, tuple[tuple[int, int], frozenset[Hashable]]]()
        kept = {"chunk": settings.chunk, "keeps": settings.kept_texts, "observer": self._observer}
        self._batch = RunningBatch(target, none, settings.batch_size, capacity, **kept)
        self._old: list[Method] = []
        self._waiting: deque[TextRequest] = deque()
        self._echoing: deque[Echo] = deque()
        self._texts: dict[Hashable, _Text] = {}
        self.teaching: Teaching | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write, and nothing to be learnt of what was written."""
        return self._quiet and not (self.teaching and self.teaching.pending)

    @property
    def _quiet(self) -> bool:
        return not (self._waiting or self._texts or self._echoing)

    def take(self, ask: Ask) -> None:
        """Take a request, or say why not."""
        ask = ask.seeded()
        try:
            self.begin(ask, wanted_of(self.served, ask))
        except PolydraftError as error:
            self.say(refusal(ask.name, error))

    def begin(self, ask: Ask, texts: Sequence[TextRequest]) -> None:
        """Take the texts of a request.

        Raises:
            PolydraftError: they cannot be written as it asks.
        """
        told: dict[str, Any] = {
            "verifier": None,  # as long as nothing is to be written
            "lossless": True,
            "prompt_tokens": [len(one.tokens) for one in texts[:: ask.n]],
            "prediction_tokens": len(texts[0].prediction),
            "seeds": [ask.seed_of(one.number) for one in texts],
        }
        for one in texts[:: ask.n] if ask.max_tokens != 0 else ():
            request, own = self._request(one)  # whatever is wrong with it is known before it waits
            self._forget_own(own)
            method = request.method or self._batch.method
            told |= {"verifier": method.verifier.name, "lossless": method.verifier.lossless}
            told |= _version_of(method, one, named=ask.speculation.version is not None)
        if ask.token_ids:
            told["prompt_ids"] = [list(one.tokens) for one in texts[:: ask.n]]
        if ask.reads_prompts:
            self._echoing.append(Echo(self.served, ask, texts, told))
        else:
            self._begin(ask, texts, told)

    def _begin(self, ask: Ask, texts: Sequence[TextRequest], told: dict[str, Any]) -> None:
        """Say that a request was taken, and let its texts wait."""
        self.say(Event("begun", ask.name, told))
        if ask.max_tokens == 0:  # the prompt alone is wanted
            for one in texts:
                self._say("gained", one, nothing())
        else:
            self._waiting.extend(texts)

    def cancel(self, name: str) -> None:
        """Forget a request."""
        self._drop(name, keeps=True)

    def _drop(self, name: str, *, keeps: bool) -> None:
        """Forget a request; what was read of its texts is kept for others unless it failed."""
        self._waiting = deque(one for one in self._waiting if one.ask.name != name)
        self._echoing = deque(one for one in self._echoing if one.ask.name != name)
        for key in [key for key, one in self._texts.items() if one.wanted.ask.name == name]:
            self._leave(key, keeps=keeps)

    def step(self) -> None:
        """Let texts join, take a step, and say what it brought.

        An error costs the texts in progress, not the server.
        """
        self._echo()
        try:
            self._join()
            found = self._stepped()
        except RankLost:  # as in `fail`, whether texts are in progress or not
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, those who wait are told, and the server goes on
            self._lost(error)
        else:
            if found is not None:
                self._tell(found)
                self._batch.sweep()
        if self.teaching is not None:
            self.teaching.teach(idle=self._quiet)

    def _echo(self) -> None:
        """Read a chunk of a prompt that is to be told: nobody waits for more of them than that."""
        if not self._echoing:
            return
        one = self._echoing[0]
        try:
            over = one.step()
        except Exception as error:  # noqa: BLE001  as in `step`
            self.fail(one.ask.name, error)
            return
        if over:
            self._echoing.popleft()
            self._begin(one.ask, one.texts, {**one.begun, **one.found})

    def _stepped(self) -> RunningStep | None:
        asked = [one.wanted.ask.logprobs for one in self._texts.values() if one.wanted.ask.logprobs is not None]
        self._observer.logprobs = max(asked, default=None)
        if self._planned:
            self._observer.begins()
            with self._observer.counting(self._statistics):
                self._batch.read()
            self._open()
        with self._observer.counting(self._statistics):
            found = self._batch.step(reads=not self._planned)
        if found is not None:
            self._observer.note(found.block, self._statistics)
            self._observer.learn(found.block)
        return found

    def _open(self) -> None:
        """Tell the planners of new texts, and of another number of rows, for which steps take another time."""
        counts, soon = self._batch.batch.text.counts, len(self._batch.running) + len(self._batch.reading)
        for kind, method in self._planned.items():
            own = {one.name: one for one in self._batch.running if one.method is method}
            before, names = self._known.get(kind, ((0, 0), frozenset()))
            new = own.keys() - names
            if own and (new or before != (len(counts), soon)):
                longest, law = max((len(own[one].tokens) for one in new), default=0), [*own.values()][-1].law
                others = max(counts) if own.keys() & names else 0
                self._observer.opens(method, longest, EXPECTED_TOKENS, len(counts), law, others, soon)
            self._known[kind] = (len(counts), soon), frozenset(own)

    def _join(self) -> None:
        """Let texts join as long as there is room; one that cannot is lost alone."""
        while self._waiting and self._batch.free:
            wanted, own = self._waiting.popleft(), None
            try:
                telling = AnswerText(self.served, wanted)
                request, own = self._request(wanted)
                kin = wanted.ask.name if wanted.ask.n > 1 else None  # whose prompt is read once for all choices
                known = self._batch.join(request, shares=not wanted.ask.alone, kin=kin)
            except Exception as error:  # noqa: BLE001  as in `step`
                self._forget_own(own)
                self.fail(wanted.ask.name, error)
                continue
            self._texts[wanted.name] = _Text(wanted, telling, own)
            if self.teaching is not None:
                self.teaching.begins(wanted, request, (request.method or self._batch.method).verifier)
            self._say("joined", wanted, {"cached": known, "prompt": len(wanted.tokens)})

    def _request(self, wanted: TextRequest) -> tuple[Request, Method | None]:
        """Return a text as the batch takes it, and the method that it has for itself."""
        request = request_of(self.served, wanted)
        if wanted.ask.planned and self._planned:
            return replace(request, method=self._planned[request.law.params.temperature == 0]), None
        speculation = replace(wanted.ask.speculation, trace=False)
        with about("prediction" if wanted.prediction else DRAFTING):
            method = self.shelf.method_for(speculation, request.law.params, wanted.prediction, wanted.draft)
        self._forget()
        return replace(request, method=method), method if wanted.prediction else None

    def _forget(self) -> None:
        """Forget methods that were not asked for in a long time, as soon as no text has them."""
        self._old += self.shelf.dropped()
        used = [one.method for one in (*self._batch.running, *self._batch.reading)]
        for method in self._old:
            if method not in used:
                self._observer.forget(method)
        self._old = [method for method in self._old if method in used]

    def _usual_methods(self) -> list[Method]:
        """Return what drafts for greedy and for sampled texts; where neither can be, the operator is told why."""
        found, errors = list[Method](), list[PolydraftError]()
        for kind in SAMPLING_BY_GREEDY.values():
            try:
                found.append(self.shelf.method_for(Speculation(), kind))
            except PolydraftError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return found

    def _tell(self, step: RunningStep) -> None:
        """Say what a step brought: first its tokens in all, so that whoever has an answer finds it counted."""
        tokens, said, failed = 0, list[tuple[TextRequest, dict[str, Any]]](), list[tuple[str, Exception]]()
        for row, gain in step.block.rows.items():
            request = step.texts[row]
            text = None if request is None else self._texts.get(request.name)
            if text is None:  # lost with another one of its request
                continue
            tokens += len(text.wanted.tokens) if text.telling.fresh else 0
            try:
                told = text.telling.gained(gain, step.block, row)
            except Exception as error:  # noqa: BLE001  as in `step`
                failed.append((text.wanted.ask.name, error))
                continue
            said.append((text.wanted, told))
            tokens += len(told["tokens"])
            if self.teaching is not None:
                self.teaching.gained(text.wanted.name, told)
            if told["finish"]:
                self._leave(text.wanted.name)
        self.say(Event("stepped", said={"tokens": tokens}))
        for wanted, told in said:
            self._say("gained", wanted, told)
        for name, error in failed:  # behind what the request's other texts gained
            self.fail(name, error)

    def _leave(self, name: Hashable, *, keeps: bool = True) -> None:
        self._forget_own(self._texts.pop(name).own)
        if self.teaching is not None:
            self.teaching.leaves(name)
        self._batch.leave(name, keeps=keeps)

    def _forget_own(self, own: Method | None) -> None:
        if own is not None:
            self._observer.forget(own)

    def _lost(self, error: Exception) -> None:
        """Say what is lost by an error in a step: the request whose own code failed, else all texts in progress.

        The step is taken again with the others.
        """
        if isinstance(error, RequestError):
            self.fail(error.whose, error.error, "unusable" if isinstance(error.error, PolydraftError) else None)
        else:
            for name in {one.wanted.ask.name for one in self._texts.values()}:
                self.fail(name, error)

    def fail(self, name: str, error: Exception, code: str | None = None) -> None:
        """Say that a request is lost, and forget it.

        Raises:
            RankLost: that is the error, after which nothing can be written here: the process ends, and is made anew.
        """
        if isinstance(error, RankLost):
            raise error
        self._drop(name, keeps=False)
        reason = str(error) if isinstance(error, PolydraftError) else f"{type(error).__name__}: {error}"
        self.say(Event("failed", name, {"message": reason, "code": code}))

    def _say(self, kind: str, wanted: TextRequest, said: dict[str, Any]) -> None:
        self.say(Event(kind, wanted.ask.name, {"number": wanted.number, **said}))


def _version_of(method: Method, wanted: TextRequest, *, named: bool) -> dict[str, Any]:
    """Return what is told of the learnt weights that draft; nothing where none do, which is refused if one is named."""
    version = wanted.ask.speculation.version
    if wanted.draft is None:
        return {}
    if version in [getattr(one, "version", None) for one in drafters_in(method.drafter)]:
        return {"version": version}
    with about(f"{DRAFTING}.version"):
        if named:
            raise InvalidParameter(f"version is {version!r}, but no learnt weights draft this text; leave version out.")
    return {}


def refusal(name: str, error: PolydraftError) -> Event:
    """Return what is said of a request that cannot be done."""
    field, code = (error.field, error.code) if isinstance(error, Unfit) else (None, None)
    return Event("refused", name, {"message": str(error), "param": field, "code": code})
