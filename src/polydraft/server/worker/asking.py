"""From what was asked to what the engine decodes: options as Hugging Face takes them, and who drafts."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.catalogue import drafter_line, verifier_by_name
from polydraft.drafters import Drafter
from polydraft.engine import Request, default_drafter
from polydraft.engine.choices import Choices, chosen_method, chosen_policy
from polydraft.engine.loop.batch import Method, check_drafting
from polydraft.engine.many.asked import PromptRequest, request_for
from polydraft.engine.target_law import RULED_OUT, StoppingCriterion
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import AdditivePenalties, AnswerForm, Grammar, HeldBack, LateGrammar, RowProcessor, TokenBias
from polydraft.probs import SamplingParams
from polydraft.server.worker.asks import DRAFTING, Ask, Speculation, about
from polydraft.server.worker.served import LoadedModels
from polydraft.server.worker.served_versions import refuse_version
from polydraft.trees import Chain, LearningPolicy, TreePolicy

MOST_NODES = 128
"""The largest tree that a request may ask for; every text has room for it."""
MOST_RIDERS = 64
"""Fewer tokens than these may be scored beside a tree."""
MOST_TOLD = 1_000_000
"""So many log-probabilities of prompts an answer tells at most, those of the likeliest tokens among them."""
MOST_KEPT = 64
"""So many kinds of parts are kept for the next request."""
MOST_VERSIONS = 2
"""Those of so many versions of the draft's weights, the last that were asked for."""


@dataclass(frozen=True, eq=False)
class TextRequest:
    """A text that is to be written: one of those of `ask`, whose grammar and prediction were made ready for all.

    `form` is what an answer of a chat looks like, None where it is a text and nothing else. `draft` has the version of
    the draft's weights that the text keeps to its end, None where weights are not learnt.
    """

    ask: Ask
    number: int
    tokens: tuple[int, ...]
    prediction: tuple[int, ...] = ()
    grammar: Grammar | LateGrammar | None = None
    form: AnswerForm | None = None
    draft: Drafter | None = None

    @property
    def name(self) -> tuple[str, int]:
        """What the batch knows it by."""
        return self.ask.name, self.number


def wanted_of(served: LoadedModels, ask: Ask) -> list[TextRequest]:
    """Return the texts that a request asks for.

    Raises:
        ContextOverflow: a prompt is too long, or the text would be.
        InvalidParameter: a prompt that is empty, or cannot be made into tokens.
    """
    with about("prediction"):
        served.check_size(ask.prediction or "", "prediction")
        prediction = tuple(served.ids(ask.prediction, special=False)) if ask.prediction else ()
    with about("logit_bias"):
        served.check_tokens([*ask.bias], "logit_bias")
        served.check_tokens(ask.stop_tokens, "stop_token_ids")
    with about(ask.grammar.field if ask.grammar else "response_format"):
        response = grammar_of(ask)
    ask, draft = _with_version(served, ask)
    found: list[TextRequest] = []
    for prompt in ask.prompts:
        with about("messages" if prompt and not isinstance(prompt[0], int | str) else "prompt"):
            served.check_size((prompt, ask.tools), "The prompt")
            if prompt and isinstance(prompt[0], int):
                _check_length(served, len(prompt), ask)
            tokens = tuple(served.ids(prompt, ask.tools, special=ask.begins, effort=ask.effort))
            _check_length(served, len(tokens), ask)
        with about("tools"):
            form = served.form(ask, response, tokens)
        grammar = response if form is None else form.grammar
        for _ in range(ask.n):
            found.append(TextRequest(ask, len(found), tokens, prediction, grammar, form, draft))
    with about("logprobs"):
        _check_echo(ask, sum(len(one.tokens) for one in found))
    return found


def _with_version(served: LoadedModels, ask: Ask) -> tuple[Ask, Drafter | None]:
    """Return a request that names the version of the draft's weights which all of its texts have, and its drafter."""
    wanted = ask.speculation.version
    if served.learnt is None:
        with about("learn"):
            if ask.learn:
                raise InvalidParameter("learn is true, but this server does not learn; leave it out.")
        with about(f"{DRAFTING}.version"):
            refuse_version(wanted)
        return ask, None
    with about(f"{DRAFTING}.version"):
        draft = served.learnt.named(wanted)
    return replace(ask, speculation=replace(ask.speculation, version=draft.version)), draft


def _check_echo(ask: Ask, count: int) -> None:
    """Check that no more is to be told of prompts than an answer may hold: they cost no pass of the model for each."""
    told = count * (1 + ask.scored) if ask.scored is not None else 0
    if told > MOST_TOLD:
        name = "n" if ask.n > 1 else "logprobs" if ask.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidParameter(
            f"{name} asks for {told:,} log-probabilities of prompts that are told back, but at most {MOST_TOLD:,} are; "
            "ask for fewer prompts, choices or logprobs."
        )


def _check_length(served: LoadedModels, count: int, ask: Ask) -> None:
    """Check that a prompt of so many tokens may be taken, with as many new ones as are asked for."""
    if not count:
        raise InvalidParameter("prompt is empty: give at least one token.")
    if count > served.max_prompt:
        raise ContextOverflow(f"The prompt has {count} tokens, but at most {served.max_prompt} are taken.")
    room = served.max_length - count
    for name, new in {ask.limit or "": ask.max_tokens or 0, "min_tokens": ask.min_tokens}.items():
        if new > room:
            said = f"{name} is {new}" if name else f"A request that does not say max_tokens asks for {new} tokens"
            raise ContextOverflow(
                f"{said}, but behind the {count} tokens of the prompt a text has room for {room} here."
            )


def request_of(served: LoadedModels, wanted: TextRequest) -> Request:
    """Prepare a text as Hugging Face's `generate` does; who drafts for it is still to be said.

    Raises:
        InvalidParameter: an option outside its range.
    """
    ask, length = wanted.ask, len(wanted.tokens)
    new = served.max_length - length if ask.max_tokens is None else ask.max_tokens
    options: dict[str, Any] = {**ask.options, "max_new_tokens": new}
    added: list[Any] = []
    if ask.bias:
        added.append(TokenBias(ask.bias, served.target.vocab_size))
    if ask.presence or ask.frequency:
        added.append(AdditivePenalties(length, ask.presence, ask.frequency))
    held = served.eos | frozenset(ask.stop_tokens)
    if ask.min_tokens and held:
        added.append(HeldBack(length, ask.min_tokens, tuple(sorted(held))))
    if added:
        options["logits_processor"] = added
    if wanted.grammar is not None:
        options |= {"grammar": wanted.grammar, "tokenizer": served.tokenizer}
    tokens = torch.tensor(wanted.tokens, device=served.target.device)
    request = request_for(served.target, PromptRequest(wanted.name, tokens, ask.seed_of(wanted.number), options), {})
    eos = frozenset() if ask.ignore_eos else request.ending.eos
    eos |= frozenset(ask.stop_tokens)
    ended = replace(request, ending=replace(request.ending, eos=eos), law=replace(request.law, eos=eos))
    if ask.told:  # behind what was prepared for the prompt, so that everything counts them to the answer
        ended = replace(ended, tokens=torch.cat((tokens, tokens.new_tensor(ask.told))))
    return with_name(ended, ask.name)


def grammar_of(ask: Ask) -> Grammar | None:
    """Return what the answer must match, if anything.

    Raises:
        InvalidParameter: the grammar is none.
        MissingExtra: what follows grammars is not installed.
    """
    wanted = ask.grammar
    if wanted is None:
        return None
    given = [] if wanted.text is None else [wanted.text]
    return getattr(Grammar, wanted.kind)(*given, **({"compact": True} if wanted.compact else {}))


def _check_words(own: Speculation) -> None:
    named = {"tree": (own.tree, chosen_policy), "verifier": (own.verifier, lambda word: verifier_by_name(word, ""))}
    for name, (word, read) in named.items():
        if word is not None:
            with about(f"{DRAFTING}.{name}"):
                read(word)


class MethodShelf:
    """Who drafts, verifies and how, by what requests say: requests that say the same share their passes."""

    def __init__(self, served: LoadedModels) -> None:
        self.served = served
        self._known: OrderedDict[tuple[Speculation, SamplingParams], Method] = OrderedDict()

    def method_for(
        self,
        speculation: Speculation,
        params: SamplingParams,
        prediction: tuple[int, ...] = (),
        draft: Drafter | None = None,
    ) -> Method:
        """Return the method of a request; `draft` has the version of the weights that its speculation names.

        Raises:
            InvalidParameter: a word that means nothing, or a tree that is too large.
            UnpairedScheme: a drafter, verifier and tree that do not go together.
        """
        if prediction:
            return self._made(speculation, params, prediction, draft)
        key = (speculation, params)
        if key not in self._known:
            self._known[key] = self._made(speculation, params, (), draft)
        self._known.move_to_end(key)
        return self._known[key]

    def planned(self, planner: TreePolicy, params: SamplingParams) -> Method:
        """Return the method of all texts for which a planner chooses the trees, at temperatures like this one.

        Raises:
            UnpairedScheme: a drafter, verifier and tree that do not go together.
        """
        settings = self.served.settings
        choices = Choices(self._drafter(None, params, self.served.draft, fixed=False), settings.verifier, planner)
        method = chosen_method(choices, self.served.target, params)
        check_drafting(method)
        return method

    def dropped(self) -> list[Method]:
        """Return the methods that were not asked for in a long time, or not of late with their weights; forget them."""
        of_version = dict.fromkeys(speculation.version for speculation, _ in reversed(self._known))
        old = {*[*of_version][MOST_VERSIONS:]}
        gone = [key for key in self._known if key[0].version in old]
        found = [self._known.pop(key) for key in gone]
        return found + [self._known.popitem(last=False)[1] for _ in range(len(self._known) - MOST_KEPT)]

    def _made(
        self,
        speculation: Speculation,
        params: SamplingParams,
        prediction: tuple[int, ...],
        draft: Drafter | None,
    ) -> Method:
        settings, own = self.served.settings, speculation
        if not own.enabled or own.max_draft_tokens == 0:
            choices = Choices("none")
        else:
            _check_words(own)
            tree = own.tree or settings.tree
            with about(f"{DRAFTING}.drafter" if own.drafter else DRAFTING):
                drafter = self._drafter(own.drafter, params, draft or self.served.draft, fixed=tree is not None)
            choices = Choices(drafter, own.verifier or settings.verifier, tree, prediction=prediction or None)
        method = chosen_method(choices, self.served.target, params)
        if own.tree and isinstance(method.policy, LearningPolicy):
            raise InvalidParameter(f"tree is {own.tree}, a planner, which is the server's to have; name a tree.")
        most = own.max_draft_tokens
        if most and method.policy.largest.size - 1 > most:
            if own.tree:
                raise InvalidParameter(f"max_draft_tokens is {most}, but the tree {own.tree} has more drafts.")
            method = chosen_method(replace(choices, policy=Chain(most)), self.served.target, params)
        if method.policy.largest.size > MOST_NODES or method.drafter.needs.riders >= MOST_RIDERS:
            raise InvalidParameter(f"tree has more than {MOST_NODES - 1} drafts; ask for a smaller one.")
        check_drafting(method)
        return method

    def _drafter(self, word: str | None, params: SamplingParams, draft: Drafter | None, *, fixed: bool) -> object:
        """Return what a word means here; folders are the operator's to name.

        Where none is said, the draft model drafts as it does for `polydraft.generate`: at temperature 0 with lookups
        before it, unless trees are fixed.
        """
        if word is None and self.served.settings.drafter is None:
            return draft and default_drafter(draft, params, self.served.target.device, fixed=fixed)
        named = word or str(self.served.settings.drafter)
        line = drafter_line(named)
        if line.store != "no" and ":" in named and named != self.served.settings.drafter:
            raise InvalidParameter("drafter names a folder, which only the server's operator may do; leave it out.")
        if not line.models:
            return line.named(named) if ":" in named else named
        if draft is None or line.models > 1:
            raise InvalidParameter(f"The drafter {named} needs a draft model that this server does not have.")
        return line.of(draft)


class RequestError(Exception):
    """An error of what the request named `whose` brought along: it is named, so that no other text is lost for it."""

    def __init__(self, whose: str, error: Exception) -> None:
        super().__init__(str(error))
        self.whose, self.error = whose, error


@dataclass(frozen=True, eq=False)
class _Processor:
    """A processor of a request; the last one sees that a token is left."""

    own: RowProcessor
    whose: str
    last: bool

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def keeps_state(self) -> bool:
        return self.own.keeps_state

    @property
    def serial(self) -> bool:
        return getattr(self.own, "serial", False)

    @property
    def call(self) -> object:
        """What is called, which may know tokens that are forced."""
        return getattr(self.own, "call", None)

    def fork(self, memo: dict[int, Any]) -> "_Processor":
        return replace(self, own=self.own.fork(memo))

    def __call__(self, history: Int[Tensor, "n t"], scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        with _blaming(self.whose):
            changed = self.own(history, scores)
            if self.last and not bool((changed > RULED_OUT).any(-1).all()):
                raise InvalidParameter(
                    "The fields of the request leave no token to go on with, such as a grammar that must end and "
                    "min_tokens that hold back the end; leave one of them out."
                )
            return changed


@dataclass(frozen=True, eq=False)
class _Criterion:
    """A criterion of a request."""

    own: StoppingCriterion
    whose: str
    stateless = True

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: object) -> Any:
        with _blaming(self.whose):
            return self.own(input_ids, scores)


@contextmanager
def _blaming(whose: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RequestError(whose, error) from error


def with_name(request: Request, whose: str) -> Request:
    """Return a text whose processors and criteria say in their errors whose they are."""
    given, ending = request.law.processors, request.ending
    processors = tuple(_Processor(one, whose, place == len(given) - 1) for place, one in enumerate(given))
    criteria = tuple(_Criterion(one, whose) for one in ending.criteria)
    return replace(request, law=replace(request.law, processors=processors), ending=replace(ending, criteria=criteria))
