"""Many texts through one running batch: each slot takes the next prompt as soon as its text has ended."""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, ModelDrafter
from polydraft.engine.block import Emission, Statistics
from polydraft.engine.decode import Method, capacity_for
from polydraft.engine.defaults import as_drafter, default_policy, default_verifier
from polydraft.engine.generate import row_laws, row_limits
from polydraft.engine.slots import Request, Slots
from polydraft.engine.wrappers.guarded import Guarded
from polydraft.engine.wrappers.timed import Stopwatch, TimedDrafter, TimedModel, TimedVerifier
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, check_memory, prepare_by_hugging_face, take_apart
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import TreePolicy
from polydraft.verifiers import TreeVerifier


@dataclass
class Completed:
    """What became of one prompt.

    Args:
        name: its name, or its place among the prompts.
        tokens: the new tokens.
        finish: why the text ended: "eos", "stop", "length" or "context"; "refused" if it was never begun.
        error: why it was refused; else empty.
        target_calls: the target's passes that this text took part in, after its prompt.
        accepted: how many of the tokens were drafted.
    """

    name: Hashable
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    target_calls: int = 0
    accepted: int = 0


class ManyRun:
    """Iterate over completed texts, in the order in which they end; `statistics` grows with every step.

    A text depends on its prompt and the seed alone, not on the batch size or its neighbours: prompt i gets the random
    numbers of row i of one large batch. Stopping early loses nothing that was yielded.
    """

    def __init__(self, setup: "ManySetup") -> None:
        self.setup = setup
        self.statistics = Statistics()
        self._waiting = deque(setup.requests)
        self._running: dict[Hashable, Completed] = {}
        self._done = deque(setup.refused)
        self._watch = Stopwatch(setup.target.device)
        self._guard = Guarded(setup.drafter)
        method = Method(
            TimedModel(setup.target, self._watch),
            TimedDrafter(self._guard, self._watch),
            TimedVerifier(setup.verifier, self._watch),
            setup.policy,
        )
        self._slots = self._opened(method) if setup.requests else None

    def _opened(self, method: Method) -> Slots:
        requests = self.setup.requests
        capacity = capacity_for(method, [one.limits for one in requests])
        return Slots(method, self.setup.size, capacity, requests[0].law.params)

    def __iter__(self) -> Iterator[Completed]:
        return self

    def __next__(self) -> Completed:
        while not self._done:
            if self._slots is None or not (self._waiting or self._running):
                raise StopIteration
            self._advance(self._slots)
        return self._done.popleft()

    def _advance(self, slots: Slots) -> None:
        """Let prompts join the free slots, and take one step."""
        try:
            with self._watch.charge("total"):
                while self._waiting and slots.free:
                    request = self._waiting.popleft()
                    slots.join(request)
                    self._running[request.name] = Completed(request.name)
                names = {slot: request.name for slot, request in slots.requests.items()}
                block = slots.step()
        finally:
            self.statistics.note(self._watch.seconds, self._guard.failure)
        self.statistics.add(block)
        for slot, gained in block.rows.items():
            self._note(names[slot], gained)

    def _note(self, name: Hashable, gained: Emission) -> None:
        one = self._running[name]
        one.tokens.extend(gained.tokens)
        one.accepted += gained.accepted
        one.target_calls += 1
        if gained.finish:
            one.finish = gained.finish
            self._done.append(self._running.pop(name))


@dataclass(frozen=True, eq=False)
class ManySetup:
    """Everything that determines a run over many prompts.

    Args:
        target: the model.
        drafter: proposes token trees.
        verifier: decides what to keep of them.
        policy: the trees' shape.
        size: the number of slots.
        requests: the prompts that can be continued.
        refused: those that cannot, with the reason.
    """

    target: HuggingFaceModel
    drafter: Drafter
    verifier: TreeVerifier
    policy: TreePolicy
    size: int
    requests: tuple[Request, ...]
    refused: tuple[Completed, ...]


def generate_many(
    model: nn.Module,
    prompts: Mapping[Hashable, Int[Tensor, " _"]] | Sequence[Int[Tensor, " _"]],
    *,
    batch_size: int = 8,
    drafter: Drafter | nn.Module | None = None,
    verifier: TreeVerifier | None = None,
    policy: TreePolicy | None = None,
    seed: int | None = None,
    **options: Any,
) -> ManyRun:
    """Continue many prompts in one running batch, and return an iterator over the texts as they end.

    Args:
        model: a Hugging Face causal model, the target.
        prompts: token ids by name, or a list of them, whose names are their places. A name that is a number fixes
            the text: the same number, seed and prompt give the same text in any run.
        batch_size: texts in progress at a time.
        drafter: as for `generate`.
        verifier: as for `generate`.
        policy: as for `generate`.
        seed: fixes the texts.
        **options: Hugging Face's generation arguments, the same for all prompts.

    Raises:
        InvalidParameter: batch_size below 1 or too large for the memory, or an option outside its range. A prompt that
            cannot be continued is no error of the run: it is yielded first, with the reason.
        UnpairedScheme: a drafter that cannot draft as the verifier needs.
    """
    if batch_size < 1:
        raise InvalidParameter(f"batch_size must be at least 1, but is {batch_size}.")
    named: dict[Hashable, Tensor] = dict(prompts.items() if isinstance(prompts, Mapping) else enumerate(prompts))
    target, chosen = HuggingFaceModel(model), as_drafter(drafter)
    start = int(torch.randint(2**62, ())) if seed is None else seed
    tried = [_request(model, target, name, place, tokens, start, options) for place, (name, tokens) in _placed(named)]
    requests = tuple(one for one in tried if isinstance(one, Request))
    refused = tuple(one for one in tried if isinstance(one, Completed))
    params = requests[0].law.params if requests else SamplingParams()
    rule, shape = verifier or default_verifier(chosen, params), policy or default_policy(chosen, params)
    chosen.check(rule.scheme)
    size = min(batch_size, len(requests))
    if requests:
        longest = max(one.limits.max_length for one in requests) + shape.shape.size + 1
        drafting = [chosen.model] if isinstance(chosen, ModelDrafter) else []
        check_memory([target, *(one for one in drafting if isinstance(one, HuggingFaceModel))], size, longest)
    return ManyRun(ManySetup(target, chosen, rule, shape, size, requests, refused))


def _placed(named: Mapping[Hashable, Int[Tensor, " _"]]) -> Iterator[tuple[int, tuple[Hashable, Int[Tensor, " _"]]]]:
    """Give every prompt the number that its random numbers follow: its name, if that is one."""
    for place, (name, tokens) in enumerate(named.items()):
        yield name if isinstance(name, int) else place, (name, tokens)


def _request(
    model: nn.Module,
    target: HuggingFaceModel,
    name: Hashable,
    place: int,
    tokens: Int[Tensor, " t"],
    seed: int,
    options: dict[str, Any],
) -> Request | Completed:
    """Return one prompt's request, or why it cannot be continued."""
    if not len(tokens):
        return Completed(name, finish="refused", error="The prompt is empty: give at least one token.")
    if len(tokens) >= target.context:
        reason = f"The prompt has {len(tokens)} tokens, but at most {target.context} fit, one of them new."
        return Completed(name, finish="refused", error=reason)

    def take(_: nn.Module, input_ids: Int[Tensor, "b t"], **given: Any) -> Request:
        config = given["generation_config"]
        prepared = take_apart(
            input_ids, given["logits_processor"], given["stopping_criteria"], None, config.pad_token_id
        )
        params = prepared.params if config.do_sample else SamplingParams(temperature=0)
        (law,), (limits,) = row_laws(prepared, params), row_limits(prepared, target.context)
        return Request(name, tokens, law, limits, Noise.of_row(seed, place))

    return prepare_by_hugging_face(model, tokens.unsqueeze(0), take, options)
