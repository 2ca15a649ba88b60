"""The law of texts whose draft learns from all that was drawn before, and three ways to lose it or to be found out."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any
from zlib import crc32

import pytest
import torch
from choices import Toy, distance, law_of
from doubles import perturbed, plain_logits, tiny_model
from heads import block_drafter
from torch import Tensor

import polydraft
from polydraft import Chain, HuggingFaceModel, ModelDrafter, TopDown, Widths
from polydraft.drafters import Drafter, DraftRequest, Session, known_outside
from polydraft.drafters.learnt import LearntDrafter, LearntHead
from polydraft.drafters.model import draft_rows
from polydraft.engine import Ending, Method, Request, RunningBatch, TargetLaw
from polydraft.models.checkpoints.weight_versions import WeightVersion
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Step, Text
from polydraft.rows import shared
from polydraft.schemes import IID, Scheme
from polydraft.trees import Draft, TreePolicy
from polydraft.verifiers import BlockVerification, PathVerifier, RecursiveRejection

TARGET, PROMPT, NEW = Toy(2, 0), [1, 0, 1], 4
WEIGHTS = tuple(Toy(2, seed) for seed in (1, 2, 5))
NEAR = 1e-12
TREES: list[tuple[PathVerifier, TreePolicy, int]] = [
    (BlockVerification(), Chain(2), 3),
    (TopDown(RecursiveRejection()), Widths((2,)), 3),
]
"""Rules, trees, and how many steps are summed."""


@dataclass(frozen=True)
class Learnt:
    """What an adversary has seen: every token that was drawn so far, whatever became of it."""

    seen: str = shared()


@dataclass
class Scheming(Drafter):
    """Drafts with weights that are a function of all that was drawn before, rejected drafts included.

    Each step reads its text anew with the weights that it has, so that no keys are old.
    """

    salt: int = 0
    used: set[int] = field(default_factory=set)
    session: Session | None = None
    name = "scheming"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> Learnt:
        self.session = session
        return Learnt("")

    def of(self, state: Learnt) -> ModelDrafter:
        version = crc32(f"{self.salt} {state.seen}".encode()) % len(WEIGHTS)
        self.used.add(version)
        return ModelDrafter(WEIGHTS[version])

    def draft(self, state: Learnt, request: DraftRequest) -> tuple[Draft, Learnt]:
        return drafted_anew(self.of(state), request, self.session), state

    def commit(self, state: Learnt, step: Step) -> Learnt:
        return Learnt(f"{state.seen} {step.tree.tokens.tolist()} {step.verdict!r}")


def drafted_anew(drafter: ModelDrafter, request: DraftRequest, session: Session | None) -> Draft:
    assert session is not None
    own = drafter.read(drafter.start(request.text, session), request.text, None)
    return drafter.draft(own, request)[0]


class Changing(Scheming):
    """Its weights are changed inside a tree: the rows that it reports are not those that tokens were drawn from.

    It says that it is sound, as a draft model does: else its rows are compared with those that were drawn from.
    """

    sound = True

    def draft(self, state: Learnt, request: DraftRequest) -> tuple[Draft, Learnt]:
        draft = drafted_anew(self.of(state), request, self.session)
        first = int(draft.tree.tokens[0, 1])  # what learnt from the tree's own first token
        other, rows = WEIGHTS[(first + 1) % len(WEIGHTS)], list[Tensor]()
        before = request.text.tokens[0, : int(request.text.lengths[0])].tolist()
        for node, parent in enumerate(draft.tree.parents[0].tolist()):
            path = [int(draft.tree.tokens[0, node])] if node else []
            while parent > 0:
                path, parent = [int(draft.tree.tokens[0, parent]), *path], int(draft.tree.parents[0, parent])
            logits = other.after([*before, *path]).log().view(1, 1, -1)
            rows.append(draft_rows(logits, SamplingParams(), None, IID())[1][0, 0])
        new = torch.stack(rows)[None, : draft.probs.shape[1]]
        return replace(draft, probs=new.where(draft.probs.sum(-1, keepdim=True) > 0, draft.probs)), state


@pytest.mark.parametrize(("rule", "policy", "steps"), TREES, ids=["chain", "tree"])
def test_weights_that_follow_from_all_that_was_drawn_keep_the_law(
    rule: PathVerifier, policy: TreePolicy, steps: int
) -> None:
    drafter = Scheming()
    law, failures = law_of(TARGET, drafter, rule, policy, [PROMPT], NEW, steps=steps)
    assert not failures and len(drafter.used) > 1
    assert distance(law, TARGET.texts(PROMPT, NEW)) < NEAR


@pytest.mark.parametrize(("rule", "policy", "steps"), TREES, ids=["chain", "tree"])
def test_weights_that_change_inside_a_tree_lose_the_law(rule: PathVerifier, policy: TreePolicy, steps: int) -> None:
    """The sum finds it where rows are not those of the weights that drew."""
    law, failures = law_of(TARGET, Changing(), rule, policy, [PROMPT], NEW, steps=min(steps, 1))
    assert not failures and distance(law, TARGET.texts(PROMPT, NEW)) > 1e-3


# One seed used again after learning from what it wrote.

VOCAB, GIVEN, COUNT, BOUND = 10, [3, 1, 4], 160, 2
EVEN: dict[str, Any] = {"temperature": 1000.0, "top_k": 0}
REAL = tiny_model("llama", VOCAB)


class Knows(Toy):
    """A draft that learnt one text by heart."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(VOCAB)
        self.table = torch.zeros(64, VOCAB, VOCAB, dtype=torch.float64)
        for place, token in enumerate(text):
            self.table[len(GIVEN) - 1 + place, :, token] = 1e5 * (place + 1)

    def _logits(self, seen: Tensor) -> Tensor:
        return seen


def written(seed: int, drafter: Any) -> list[int]:
    ids = torch.tensor([GIVEN])
    found: Any = polydraft.generate(
        REAL, ids, attention_mask=torch.ones_like(ids), seed=seed, drafter=drafter, max_new_tokens=2, policy=1, **EVEN
    )
    return found.sequences[0, len(GIVEN) :].tolist()


def again(seed: int, key: Callable[[list[int]], bytes]) -> int:
    """Return the first token of a seed's second text, drafted by weights that were learnt from its first."""
    first = written(seed, LearntDrafter(Knows([0, 0]), params=SamplingParams()))
    return written(seed, LearntDrafter(Knows(first), params=SamplingParams(), key=key(first)))[0]


def of_version(text: list[int]) -> bytes:
    """Return the key of a version whose weights follow from a text."""
    return WeightVersion(1, f"{crc32(repr(text).encode()):032x}", {}).key(1)


@pytest.mark.slow
def test_a_seed_used_again_after_learning_follows_the_law_and_without_the_fork_it_does_not() -> None:
    """All tokens are about as likely. Under the law one of them comes twice or less in 160 texts once in 50,000 times.

    The first text is drafted by a draft that knows token 0 alone: another token comes where it was rejected, by a
    second number. The second text is drafted by what learnt the first. Without a key it is rejected by the same number,
    and by the same second number the token before the learnt one comes: so the last token never does. The test would
    be worth nothing if that did not show.
    """
    law = (plain_logits(REAL, GIVEN) / EVEN["temperature"]).softmax(-1)
    chance = float(law[-1])
    assert sum(comb(COUNT, k) * chance**k * (1 - chance) ** (COUNT - k) for k in range(BOUND + 1)) < 2e-5
    forked = [again(seed, of_version) for seed in range(COUNT)]
    assert forked.count(VOCAB - 1) > BOUND
    unforked = [again(seed, lambda _: b"") for seed in range(COUNT)]
    assert unforked.count(VOCAB - 1) <= BOUND


def test_each_version_and_each_look_has_numbers_of_its_own_and_what_was_not_learnt_keeps_the_seeds() -> None:
    versions = [WeightVersion(number, digest * 16, {}) for number, digest in ((0, "aa"), (1, "bb"), (2, "bb"))]
    keys = [one.key(look) for one in versions for look in (0, 1, 2)]
    assert keys[0] == b"" and len({*keys}) == len(keys)
    head = block_drafter()
    for drafters in (
        [LearntDrafter(WEIGHTS[0], key=key) for key in keys],
        [LearntHead(head.network, head.ends, key=key) for key in keys],
    ):
        assert known_outside(drafters[0], 0) == b"" and len({known_outside(one, 0) for one in drafters}) == len(keys)


# Rows of several versions in one batch, and keys of old weights.

MODEL = tiny_model("llama", 24)
PROMPTS = {"one": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], "two": [2, 7, 1, 8, 2], "three": [4, 4]}
VERSIONS = [
    LearntDrafter(HuggingFaceModel(perturbed(MODEL, 0.1, seed)), version=f"{seed}", key=f"{seed}".encode())
    for seed in range(2)
]
HEADS = [
    LearntHead(one.network, one.ends, version=f"{seed}", key=f"{seed}".encode())
    for seed, one in enumerate(block_drafter(seed=seed) for seed in (3, 4))
]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0}


@pytest.mark.parametrize("versions", [VERSIONS, HEADS], ids=["draft model", "head"])
def test_rows_of_two_versions_in_one_batch_are_their_single_runs(versions: list[Drafter]) -> None:
    own = {"one": {"drafter": versions[0]}, "two": {"drafter": versions[1]}, "three": {"drafter": versions[1]}}
    run = polydraft.generate_many(MODEL, PROMPTS, per_prompt=own, seed=5, batch_size=3, policy=3, **OPTIONS)
    done = {str(one.name): one for one in run}
    assert not run.statistics.fallback and {*done} == {*PROMPTS}
    for name, one in done.items():
        ids = torch.tensor([PROMPTS[name]])
        alone: Any = polydraft.generate(
            MODEL, ids, attention_mask=torch.ones_like(ids), seed=one.seed, policy=3, **own[name], **OPTIONS
        )
        assert one.tokens == alone.sequences[0, ids.shape[1] :].tolist()
    assert sum(bool(one.accepted) for one in done.values()) >= (len(done) if versions is VERSIONS else 1)


def trees_of(batch: RunningBatch, drafter: Drafter, name: str) -> list[list[int]]:
    """Return what was drafted for a text, step by step."""
    method = Method(drafter, BlockVerification(), Chain(3))
    prompt, law = torch.tensor(PROMPTS["one"]), TargetLaw(SamplingParams())
    batch.join(Request(name, prompt, law, Ending(len(prompt) + 8), Noise.from_seed(3, 1), method))
    found = list[list[int]]()
    while name in [one.name for one in batch.running]:
        step = batch.step()
        assert step is not None
        found.append(step.block.tree.tokens[0].tolist())
        batch.sweep()
    return found


def new_batch(first: Drafter = VERSIONS[0]) -> RunningBatch:
    method = Method(first, BlockVerification(), Chain(3))
    return RunningBatch(HuggingFaceModel(MODEL), method, 2, 64, keeps=4)


def test_no_text_is_drafted_with_keys_of_other_weights_and_the_test_would_see_it() -> None:
    """A text like one that is kept goes on from the target's keys, and from the draft's if its weights are the same.

    Weights that change in place leave such keys behind: the text's law stays, its drafts are other ones.
    """
    batch, fresh = new_batch(), trees_of(new_batch(), VERSIONS[1], "alone")
    trees_of(batch, VERSIONS[0], "before")
    assert trees_of(batch, VERSIONS[1], "behind") == fresh
    network = perturbed(MODEL, 0.1, 0)
    drafter = LearntDrafter(HuggingFaceModel(network, fused=False), key=VERSIONS[1].key)
    batch = new_batch()
    trees_of(batch, drafter, "before")
    with torch.no_grad():
        for one, new in zip(network.parameters(), perturbed(MODEL, 0.1, 1).parameters(), strict=True):
            one.copy_(new)
    assert trees_of(batch, drafter, "behind") != fresh
    assert trees_of(new_batch(), drafter, "without what was kept") == fresh


def test_no_text_is_drafted_with_what_a_head_of_other_weights_kept_and_the_test_would_see_it() -> None:
    """A head keeps keys of committed text; they are taken over by the same network, and by no other one."""
    fresh = trees_of(new_batch(HEADS[1]), HEADS[1], "alone")
    batch = new_batch(HEADS[0])
    trees_of(batch, HEADS[0], "before")
    assert trees_of(batch, HEADS[1], "behind") == fresh
    network = block_drafter(seed=3).network
    drafter = LearntHead(network, HEADS[0].ends, key=HEADS[1].key)
    batch = new_batch(drafter)
    trees_of(batch, drafter, "before")
    network.load_state_dict(HEADS[1].network.state_dict())
    assert trees_of(batch, drafter, "behind") != fresh
    assert trees_of(new_batch(drafter), drafter, "without what was kept") == fresh
