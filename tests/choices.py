"""The law of short texts through the engine itself: every draw is a choice, and all choices are made in turn."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polydraft.catalogue import every_scheme
from polydraft.drafters import Drafter
from polydraft.engine import Ending, Method, Observer, Prompts, TargetLaw
from polydraft.engine.loop.step import begin, step
from polydraft.engine.target_law import JointCriteria, Processors
from polydraft.models import Cache, Facts, Forward, LanguageModel
from polydraft.planning import Opening, Spent
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import enumerate_drafts
from polydraft.trees import Draft, LearningPolicy, TreePolicy, Verdict
from polydraft.verifiers import PathVerifier
from polydraft.verifiers.trees.lifts import PathLaw

Law = dict[tuple[int, ...], float]
HOT = SamplingParams()


class Memory(Cache):
    """The token and the place in every slot."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.slots = torch.zeros(2, batch, capacity, dtype=torch.int64)

    def keep(self, base: Tensor, path: Tensor) -> None:
        before = self.slots.clone()
        for row, nodes in enumerate(path.tolist()):
            for depth, node in enumerate(nodes):
                if node >= 0:
                    self.slots[:, row, base[row] + 1 + depth] = before[:, row, base[row] + node]

    def put(self, row: int, other: "Memory", length: int) -> "Memory":
        self.slots[:, row, :length] = other.slots[:, 0, :length]
        return self

    def select(self, rows: Sequence[int]) -> "Memory":
        alone = Memory(len(rows), 0)
        alone.slots = self.slots[:, rows[0] : rows[-1] + 1]
        return alone

    def take(self, row: int, other: "Memory", slots: Sequence[Tensor], newest: Tensor, first: int) -> None:
        """Copy what lies in the slots of all heads, which see one law here."""
        self.slots[:, row, first : first + len(newest)] = other.slots[:, 0, slots[0][0]]


class Toy(LanguageModel):
    """A law that depends on the whole text: on every token and its place."""

    layers: int | None = None
    width: int | None = None

    def __init__(self, vocab: int = 3, seed: int = 0) -> None:
        self.vocab_size = vocab
        stream = torch.Generator().manual_seed(seed)
        self.table = torch.randn(64, vocab, vocab, generator=stream, dtype=torch.float64)

    @property
    def facts(self) -> Facts:
        return Facts(self.vocab_size, 64, torch.device("cpu"), layers=self.layers, width=self.width)

    def new_cache(self, batch: int, capacity: int, sources: Sequence[Any] | None = None) -> Memory:
        return Memory(batch, capacity)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Memory, starts: Tensor, **_: Any
    ) -> Forward:
        slots = (starts.unsqueeze(-1) + torch.arange(tokens.shape[1])).clamp_min(0)
        cache.slots[0].scatter_(1, slots, tokens)
        cache.slots[1].scatter_(1, slots, positions)
        known = cache.slots[:, :, : mask.shape[-1]]
        return Forward(self._logits(mask.double() @ self.table[known[1], known[0]]), {})

    def after(self, text: Sequence[int]) -> Tensor:
        """Return the law of the token that follows a text."""
        return self._logits(self.table[torch.arange(len(text)), torch.tensor(text)].sum(dim=0)).softmax(dim=-1)

    def _logits(self, seen: Tensor) -> Tensor:
        return 1.5 * (2 * seen).sin()

    def texts(self, prompt: Sequence[int], new: int, eos: frozenset[int] = frozenset()) -> Law:
        """Return the law of the next tokens."""
        if not new:
            return {(): 1.0}
        law: Law = {}
        for token, chance in enumerate(self.after(prompt).tolist()):
            rest = {(): 1.0} if token in eos else self.texts([*prompt, token], new - 1, eos)
            law.update({(token, *text): chance * share for text, share in rest.items()})
        return law


@dataclass
class Choices:
    """What was chosen, draw by draw; `next` goes on to the next of all ways to choose.

    What is drawn from the same random numbers again comes out the same again (`drawn`).
    """

    made: list[tuple[int, list[float]]] = field(default_factory=list)
    at: int = 0
    chance: float = 1.0
    known: dict[tuple[float, ...], tuple[int, list[float]]] = field(default_factory=dict)

    def again(self) -> None:
        """Begin with the first draw again."""
        self.at, self.chance = 0, 1.0
        self.known.clear()

    def drawn(self, numbers: list[float], chances: list[float]) -> int:
        key = tuple(numbers)
        if key not in self.known:
            self.known[key] = self.choose(chances), chances
        place, before = self.known[key]
        assert len(before) == len(chances) and max(abs(a - b) for a, b in zip(before, chances, strict=True)) < 1e-9
        return place

    def choose(self, chances: list[float]) -> int:
        if self.at == len(self.made):
            self.made.append((next(place for place, one in enumerate(chances) if one > 0), chances))
        place, known = self.made[self.at]
        assert len(known) == len(chances) and max(abs(a - b) for a, b in zip(known, chances, strict=True)) < 1e-12
        self.at, self.chance = self.at + 1, self.chance * known[place]
        return place

    def next(self) -> bool:
        self.made = self.made[: self.at]
        while self.made:
            place, chances = self.made.pop()
            left = [later for later in range(place + 1, len(chances)) if chances[later] > 0]
            if left:
                self.made.append((left[0], chances))
                return True
        return False


@dataclass(frozen=True)
class OfLaw:
    """A rule whose verdicts follow another law than its own: a wrong one, which tests must catch."""

    rule: PathVerifier
    law: type[PathLaw]
    lossless = True
    name = "not lossless"

    @property
    def scheme(self) -> Any:
        return self.rule.scheme

    def path_law(self, draft: Draft, target_probs: Tensor) -> PathLaw:
        return self.law(**vars(self.rule.path_law(draft, target_probs)))


@dataclass(frozen=True)
class Chosen:
    """A verifier whose verdicts are choices, by the law of its verdict given the draft."""

    rule: PathVerifier
    choices: Choices
    lossless = True
    name = "chosen"

    @property
    def scheme(self) -> Any:
        return self.rule.scheme

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        law, parents = self.rule.path_law(draft, target_probs), draft.tree.parents.tolist()
        every = (law.end.unsqueeze(-1) * law.next_token(draft, target_probs)).flatten(1)
        paths, following = list[list[int]](), list[int]()
        for row, chances in enumerate((every / every.sum(dim=-1, keepdim=True)).tolist()):
            node, token = divmod(self.choices.choose(chances), law.next_token(draft, target_probs).shape[-1])
            path = list[int]()
            while node > 0:
                path, node = [node, *path], parents[row][node]
            paths.append(path)
            following.append(token)
        lengths = [*map(len, paths)]
        padded = torch.full((len(paths), max(lengths)), -1)
        for row, path in enumerate(paths):
            padded[row, : len(path)] = torch.tensor(path, dtype=torch.int64)
        return Verdict(padded, torch.tensor(lengths), torch.tensor(following))


@contextmanager
def chosen_drafts(choices: Choices) -> Iterator[None]:
    """Let all drafts be choices."""

    def sample(self: Any, rows: Tensor, counts: Tensor, uniforms: Tensor, k: int) -> Tensor:
        drafts = list[list[int]]()
        laws, numbers = rows.reshape(-1, *rows.shape[counts.dim() :]), uniforms.flatten(0, -2).tolist()
        for row, own, count in zip(laws, numbers, counts.flatten().tolist(), strict=True):
            there = [-1] * k
            if count:
                every, chances = enumerate_drafts(self, row.double(), count)
                there[:count] = every[choices.drawn(own, chances.tolist())].tolist()
            drafts.append(there)
        return torch.tensor(drafts).view(*counts.shape, k)

    kinds = [type(one) for one in every_scheme() if one.independent and not one.deterministic]
    before = {kind: kind.sample for kind in kinds}
    for kind in kinds:
        kind.sample = sample  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, own in before.items():
            kind.sample = own  # type: ignore[method-assign]


def law_of(
    target: Toy,
    drafter: Drafter | Callable[[Choices], Drafter],
    rule: PathVerifier,
    policy: TreePolicy,
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    steps: int = 9,
    eos: frozenset[int] = frozenset(),
    place: Callable[[Tensor], Tensor] = torch.clone,
    processors: Processors = (),
    rest: Callable[[list[int], int], Law] | None = None,
    together: JointCriteria | None = None,
    laws: Sequence[TargetLaw] | None = None,
) -> tuple[Law, set[str]]:
    """Return the law of the first row's next tokens, and why drafters failed, in any of all steps.

    After `steps` steps, what is missing is written by the target. A planner is told of each text and of each step.
    A drafter with choices of its own is made of them.

    `place` says on which device the text lies. With `processors`, `rest` is the law of so many more tokens.
    `together` are criteria that see all rows. `laws` are those of the rows; else all are that of the target at
    temperature 1, behind the processors. Prompts may differ in length.
    """
    choices, law, failures, rows = Choices(), defaultdict[tuple[int, ...], float](float), set[str](), len(prompts)
    lengths, own_laws = [*map(len, prompts)], laws or (TargetLaw(HOT, processors, eos=eos),) * rows
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    text = Text(place(torch.tensor(padded)), place(torch.tensor(lengths)))
    endings = tuple(Ending(length + new, eos=eos, together=together) for length in lengths)
    plans = isinstance(policy, LearningPolicy)
    observer = Observer(target)
    drafts = drafter(choices) if callable(drafter) else drafter
    method = observer.watched(Method(drafts, Chosen(rule, choices), policy))
    asked = Prompts(text, tuple(own_laws), endings, Noise.from_seed(0, rows))
    first = begin(target, method, asked)
    with chosen_drafts(choices):
        while True:  # a step writes behind what was committed only, so that all begin with the same rows
            choices.again()
            batch, found, left = first, list[int](), steps
            if plans:
                policy.texts_opened(Opening(len(prompts[0]), new, rows, 0.1))
            while left and 0 in batch.going:
                batch, block, taken = step(batch)
                block = observer.told(block, taken)
                failures |= {fault.reason for fault in block.faults}
                if plans:
                    policy.learn(block.lessons[0], Spent(0.1, 1.0, 0.1), block.tree.tokens.numel())
                found, left = [*found, *block.rows[0].tokens], left - 1
            missing = new - len(found) if 0 in batch.going else 0
            after = rest(found, missing) if rest else target.texts([*prompts[0], *found], missing, eos)
            for more, share in after.items():
                law[(*found, *more)] += choices.chance * share
            if not choices.next():
                return dict(law), failures


def distance(one: Law, other: Law) -> float:
    """Return the total variation between two laws."""
    return sum(abs(one.get(text, 0) - other.get(text, 0)) for text in one.keys() | other.keys()) / 2
