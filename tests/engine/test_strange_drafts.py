"""Drafters that propose nonsense: the text is never lost, and where something can be verified its law stays exact."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from doubles import Unparted, perturbed, tiny_model
from growing import DEPTH, TOKENS, DeepWorld, every_growth, target_rows
from scipy.stats import chi2
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import (
    Chain,
    HuggingFaceModel,
    ModelDrafter,
    NgramDrafter,
    NoDraft,
    Widths,
    generate_many,
)
from polydraft.drafters import Drafter, DraftRequest, EnsembleDrafter, LookupFirst, Session, is_sound
from polydraft.engine import Ending, Method, Run, TargetLaw
from polydraft.engine.loop.checking import checked
from polydraft.engine.loop.drafting import known_tokens, with_unknown
from polydraft.engine.run import Setup
from polydraft.errors import UnpairedScheme
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Step, Text
from polydraft.schemes import IID, Product, Scheme, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Draft, Frontier, TreePolicy, grow
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    NaiveMatch,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SharedNoise,
    TopDown,
    TopThenSampleRule,
    TraversalVerification,
    Valued,
)

FALSE_ALARM_RATE = 1e-6
VOCAB, NEW = 24, 9
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
SHAPE = Widths((2, 1))


@cache
def target(vocab: int = VOCAB) -> PreTrainedModel:
    return tiny_model("llama", vocab)


def good_drafter() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target(), 0.05)), shortlist_size=8)


@dataclass
class Bending(Drafter):
    """A drafter whose second and later proposals are changed."""

    bend: Callable[[Draft], Any]
    after: int = 1
    drafted: int = 0
    name = "bending"

    def __post_init__(self) -> None:
        self.inner = Unparted(good_drafter())

    def check(self, scheme: Scheme) -> None:
        self.inner.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        return self.inner.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        return self.inner.read(state, text, features)

    def draft(self, state: Any, request: DraftRequest) -> tuple[Any, Any]:
        self.drafted += 1
        draft, after = self.inner.draft(state, request)
        return (self.bend(draft) if self.drafted > self.after else draft), after

    def commit(self, state: Any, step: Step) -> Any:
        return self.inner.commit(state, step)


def bent(draft: Draft, **parts: object) -> Draft:
    """Return a draft with other parts, whatever they are: no constructor looks at them."""
    result = copy.copy(draft)
    result_tree = copy.copy(draft.tree)
    result_topology = copy.copy(draft.tree.topology)
    for name, part in parts.items():
        *path, last = name.split("__")
        owner = {"": result, "tree": result_tree, "topology": result_topology}["".join(path[-1:])]
        object.__setattr__(owner, last, part)
    if any("topology__" in name for name in parts):
        object.__setattr__(result_tree, "topology", result_topology)
    if any(name.startswith("tree__") for name in parts):
        object.__setattr__(result, "tree", result_tree)
    return result


def put(tensor: Tensor, value: float, *place: int) -> Tensor:
    changed = tensor.clone()
    changed[(slice(None), *place)] = value
    return changed


NOT_DRAWN = "is not the one that was drawn"
NONSENSE: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "nothing": (lambda draft: None, "draft must return a Draft, but returned a NoneType"),
    "a tree alone": (lambda draft: draft.tree, "but returned a TokenTree"),
    "no tree": (lambda draft: bent(draft, tree=None), "tree must be a TokenTree, but is a NoneType"),
    "no topology": (lambda draft: bent(draft, tree__topology=3), "tree.topology must be a Topology, but is a int"),
    "a list of tokens": (lambda draft: bent(draft, tree__tokens=[[1, 2]]), "tree.tokens must be a tensor"),
    "tokens of another type": (
        lambda draft: bent(draft, tree__tokens=draft.tree.tokens.int()),
        "tree.tokens must be of type torch.int64, but is of type torch.int32",
    ),
    "whole numbers for probabilities": (lambda draft: bent(draft, probs=draft.probs.long()), "a floating point type"),
    "numbers for flags": (lambda draft: bent(draft, tree__valid=draft.tree.valid.long()), "torch.bool"),
    "another batch": (
        lambda draft: bent(draft, atoms=draft.atoms.repeat(3, 1)),
        r"atoms must have shape \(\d, 5\), .*, but has \(\d, 5\)",
    ),
    "another device": (
        lambda draft: bent(draft, shortlist=draft.shortlist.to("meta")),
        "shortlist must be on cpu, where the text is, but is on meta",
    ),
    "rows for members": (lambda draft: bent(draft, probs=draft.probs.unsqueeze(-2)), "probs must have shape"),
    "no places": (lambda draft: bent(draft, shortlist=draft.shortlist[..., :0]), "all sizes positive"),
    "another root": (
        lambda draft: bent(draft, tree__tokens=put(draft.tree.tokens, 0, 0)),
        "roots must be the last tokens",
    ),
    "a root that is not there": (
        lambda draft: bent(draft, tree__valid=put(draft.tree.valid, False, 0)),
        "roots must be|below nodes that are not",
    ),
    "a child before its parent": (
        lambda draft: bent(draft, tree__topology__parents=put(draft.tree.parents, 4, 1)),
        "parents must be -1 for the root and smaller",
    ),
    "two roots": (lambda draft: bent(draft, tree__topology__parents=put(draft.tree.parents, -1, 2)), "parents must be"),
    "parents far outside": (
        lambda draft: bent(draft, tree__topology__parents=put(draft.tree.parents, 10**9, 3)),
        "parents must be",
    ),
    "a child of padding": (
        lambda draft: bent(draft, tree__valid=put(draft.tree.valid, False, 1)),
        "valid nodes below nodes that are not",
    ),
    "atoms outside the list": (lambda draft: bent(draft, atoms=put(draft.atoms, 8, 2)), "whose atom is not the place"),
    "atoms of no draft": (lambda draft: bent(draft, atoms=put(draft.atoms, -1, 2)), "whose atom is not the place"),
    "atoms of other tokens": (
        lambda draft: bent(draft, tree__tokens=(draft.tree.tokens + (draft.tree.depth > 1)) % VOCAB),
        "whose atom is not the place",
    ),
    "too long a tree": (
        lambda draft: grown_to(draft, (1,) * 9),
        "trees have 10 nodes, but the policy's have at most 5",
    ),
    "too many children": (lambda draft: grown_to(draft, (4,)), "a node with 4 drafts, but was to have 2 at most"),
    "more children than it says": (
        lambda draft: bent(draft, most_children=1),
        "a node with 2 drafts, but was to have 1 at most",
    ),
    "probabilities of nan": (lambda draft: bent(draft, probs=draft.probs * torch.nan), NOT_DRAWN),
    "negative probabilities": (lambda draft: bent(draft, probs=-draft.probs), NOT_DRAWN),
    "probabilities of sum 2": (lambda draft: bent(draft, probs=2 * draft.probs), NOT_DRAWN),
    "no probabilities": (lambda draft: bent(draft, probs=0 * draft.probs), NOT_DRAWN),
    "a token listed twice": (
        lambda draft: bent(draft, shortlist=twice(draft.shortlist)),
        f"{NOT_DRAWN}|whose atom",
    ),
    "tokens beyond the vocabulary": (
        lambda draft: moved(draft, 10**6),
        f"has the token 10000.., but the target's|{NOT_DRAWN}",
    ),
    "negative tokens": (
        lambda draft: moved(draft, -30),
        f"has the token -.*, but the target's tokens are 0 to 23|{NOT_DRAWN}",
    ),
    "the token -1": (
        lambda draft: renamed(draft, int(draft.tree.tokens[0, 1]), -1),
        f"has the token -1, but the target's tokens are 0 to 23|{NOT_DRAWN}",
    ),
}


def grown_to(draft: Draft, widths: tuple[int, ...]) -> Draft:
    root = draft.tree.tokens[:, 0]
    rows = torch.ones(len(root), 1, VOCAB) / VOCAB
    noise = Noise.from_seed(0, len(root))

    def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
        width = frontier.tokens.shape[1]
        return torch.arange(VOCAB).expand(len(root), width, VOCAB), rows.expand(-1, width, -1)

    return grow(root, Widths(widths), TopThenSample(), propose, noise)


def twice(listed: Tensor) -> Tensor:
    changed = listed.clone()
    changed[..., -1] = changed[..., -2]
    return changed


def moved(draft: Draft, by: int) -> Draft:
    """Move the ids of all drafts, in lists and trees."""
    tokens = (draft.tree.tokens + by).where(draft.tree.depth > 0, draft.tree.tokens)
    return bent(draft, tree__tokens=tokens, shortlist=(draft.shortlist + by).where(draft.shortlist >= 0, -1))


def renamed(draft: Draft, old: int, new: int) -> Draft:
    tree = draft.tree
    tokens = tree.tokens.masked_fill((tree.tokens == old) & (tree.depth > 0), new)
    return bent(draft, tree__tokens=tokens, shortlist=draft.shortlist.masked_fill(draft.shortlist == old, new))


def generate(drafter: Drafter, **options: Any) -> polydraft.GenerationOutput:
    given = {"max_new_tokens": NEW, "policy": SHAPE, **options}
    return polydraft.generate(target(), PROMPT, drafter=drafter, **given)


SAMPLING = {"temperature": 0.9, "top_k": 0, "seed": 3, "verifier": TopDown(TopThenSampleRule())}


@pytest.mark.long(16)
@pytest.mark.parametrize(("bend", "said"), NONSENSE.values(), ids=[*NONSENSE])
def test_nonsense_is_said_once_and_the_rest_is_decoded_plainly(bend: Callable[[Draft], Any], said: str) -> None:
    drafter = Bending(bend)
    with pytest.warns(RuntimeWarning, match=f"The bending drafter failed.*(?:{said})") as caught:
        output = generate(drafter, temperature=0, verifier=TopDown(NaiveMatch(TopThenSample())))
    assert len(caught) == 1
    assert torch.equal(output.sequences, generate(NoDraft(), temperature=0).sequences)
    assert output.statistics.fallback.startswith("InvalidDraft: ")
    assert output.finish == ("length",) and drafter.drafted == 2
    assert output.statistics.drafted > 0


@pytest.mark.long(16)
@pytest.mark.parametrize(("bend", "said"), NONSENSE.values(), ids=[*NONSENSE])
def test_no_text_of_a_batch_is_lost(bend: Callable[[Draft], Any], said: str) -> None:
    prompts = [[3, 1, 4, 1, 5], [7], [2, 7, 1, 8]]
    with pytest.warns(RuntimeWarning, match=f"(?:{said})"):
        run = generate_many(
            target(), prompts, batch_size=2, drafter=Bending(bend), policy=SHAPE, max_new_tokens=NEW, **SAMPLING
        )
        done = list(run)
    assert [(one.finish, len(one.tokens)) for one in done] == [("length", NEW)] * 3
    assert all(0 <= token < VOCAB for one in done for token in one.tokens)
    assert run.statistics.fallback.startswith("InvalidDraft: ")


def test_what_was_drawn_before_an_error_is_verified_and_nothing_is_drafted_after_it() -> None:
    def cut_short(draft: Draft) -> Draft:
        return replace(draft, failure=RuntimeError("no more"))

    good = polydraft.stream(target(), PROMPT, drafter=good_drafter(), policy=SHAPE, max_new_tokens=NEW, **SAMPLING)
    drafter = Bending(cut_short)
    run = polydraft.stream(target(), PROMPT, drafter=drafter, policy=SHAPE, max_new_tokens=NEW, **SAMPLING)
    with pytest.warns(RuntimeWarning, match=r"The bending drafter failed \(RuntimeError: no more\)") as caught:
        blocks = list(run)
    assert len(caught) == 1 and drafter.drafted == 2
    expected = [replace(next(good).rows[0], source="bending") for _ in range(2)]
    assert [block.rows[0] for block in blocks[:2]] == expected
    assert [block.rows[0].drafted for block in blocks] == [4, 4, *[0] * (len(blocks) - 2)]
    assert run.statistics.fallback == "RuntimeError: no more"


def test_a_later_run_asks_the_drafter_again() -> None:
    drafter, prompts = Bending(lambda draft: None), [[3, 1, 4, 1, 5], [7]]
    for _ in range(2):
        drafter.drafted = 0
        with pytest.warns(RuntimeWarning, match="The bending drafter failed"):
            run = generate_many(target(), prompts, drafter=drafter, policy=SHAPE, max_new_tokens=NEW, **SAMPLING)
            assert len(list(run)) == 2
        assert run.statistics.drafted > 0 and drafter.drafted == 2


def test_a_pairing_that_the_user_must_mend_is_raised_in_any_step() -> None:
    def mispaired(draft: Draft) -> Draft:
        raise UnpairedScheme("not like this")

    run = polydraft.stream(target(), PROMPT, drafter=Bending(mispaired), policy=SHAPE, max_new_tokens=NEW, **SAMPLING)
    for _ in range(2):
        with pytest.raises(UnpairedScheme, match="not like this"):
            run.exhaust()
    assert not run.over and run.statistics.steps == 1


def test_padding_may_have_any_token_and_a_good_drafter_is_asked_to_the_end() -> None:
    def padded(draft: Draft) -> Draft:
        valid = put(draft.tree.valid, False, 4)
        return bent(draft, tree__tokens=put(draft.tree.tokens, -5, 4), tree__valid=valid)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bend, verifier in ((padded, TopDown(NaiveMatch(TopK()))), (lambda draft: draft, SAMPLING["verifier"])):
            output = generate(Bending(bend), **{**SAMPLING, "verifier": verifier})
            assert output.statistics.fallback == ""


def test_who_is_checked() -> None:
    draft = good_drafter()

    class Derived(ModelDrafter):
        """May draft otherwise."""

    sound = (NoDraft(), NgramDrafter(), draft, EnsembleDrafter(((draft.model, None),)), LookupFirst(draft))
    assert all(map(is_sound, sound))
    assert not any(map(is_sound, (Derived(draft.model), Bending(copy.copy), LookupFirst(Bending(copy.copy)))))


def test_own_drafts_pass_the_door() -> None:
    text, noise = Text(PROMPT, torch.tensor([5])), Noise.from_seed(0, 1)
    for scheme in (IID(), WithoutReplacement(), TopK(), TopThenSample(), Product()):
        state = good_drafter().start(text, Session(SamplingParams(), 40, VOCAB))
        draft, _ = good_drafter().draft(state, DraftRequest(text, scheme, SHAPE, noise))
        assert checked(draft, text, scheme, SHAPE, VOCAB).failure is None
    whole = replace(good_drafter(), shortlist_size=None)
    draft, _ = whole.draft(
        whole.start(text, Session(SamplingParams(), 40, VOCAB)), DraftRequest(text, IID(), Chain(2), noise)
    )
    assert checked(draft, text, IID(), Chain(2), VOCAB).whole
    turned = replace(draft, shortlist=draft.shortlist.flip(-1), probs=draft.probs.flip(-1))
    turned = replace(turned, atoms=(VOCAB - 1 - draft.atoms).where(draft.atoms >= 0, -1))
    assert not checked(turned, text, IID(), Chain(2), VOCAB).whole


# What stays exact, by enumeration of all drafts.

STRANGERS = (99, -7)


@dataclass(frozen=True)
class StrangeWorld(DeepWorld):
    """Draft rows over three tokens and two ids that the target does not have."""

    @classmethod
    def random(cls, seed: int, members: int = 0, zeros: bool = False) -> "StrangeWorld":
        plain = DeepWorld.random(seed, members, zeros)
        stream = torch.Generator().manual_seed(seed)
        share = torch.rand(*plain.draft.shape[:-1], len(STRANGERS), generator=stream, dtype=torch.float64) * 0.3
        draft = torch.cat([plain.draft * (1 - share.sum(dim=-1, keepdim=True)), share], dim=-1)
        return cls(plain.target, draft)

    def propose(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        listed = torch.tensor([*range(TOKENS), *STRANGERS])
        law = self.draft[frontier.depth][frontier.tokens.clamp(0, TOKENS - 1)]
        return listed.expand(*frontier.tokens.shape, len(listed)), law


def law_of(world: DeepWorld, verifier: PathVerifier, draft: Draft, chance: Tensor) -> Tensor:
    """Return the law of four tokens if these drafts are verified and the target goes on."""
    known = replace(draft, tree=known_tokens(draft, TOKENS))
    own = (known.tree.tokens == draft.tree.tokens) & draft.tree.valid
    rows = with_unknown(draft, target_rows(world, replace(known, tree=replace(known.tree, valid=own))))
    law = verifier.path_law(draft, rows)
    emitted = law.end.unsqueeze(-1) * law.next_token(draft, rows) * chance.view(-1, 1, 1)
    assert not bool(emitted[~own].any()) and not bool(emitted[..., TOKENS:].any())
    joint, places = torch.zeros_like(world.joint), torch.zeros_like(known.tree.tokens)
    for node in range(1, places.shape[-1]):
        above = known.tree.parents[:, node]
        places[:, node] = TOKENS * places[torch.arange(len(places)), above] + known.tree.tokens[:, node]
    for deep in range(len(world.target)):
        here = own & (draft.tree.depth == deep)
        mass = torch.zeros(TOKENS**deep, TOKENS, dtype=torch.float64)
        mass.index_add_(0, places[here], emitted[here][:, :TOKENS])
        joint += mass.view([TOKENS] * (deep + 1) + [1] * (DEPTH - deep)) * world.after(deep + 1)
    return joint


def at_the_door(draft: Draft, scheme: Scheme, policy: TreePolicy) -> Draft:
    rows = len(draft.atoms)
    text = Text(torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, dtype=torch.int64))
    return checked(draft, text, scheme, policy, TOKENS)


RULES: list[tuple[PathVerifier, TreePolicy]] = [
    (TopDown(RecursiveRejection()), Widths((2, 1, 1))),
    (TopDown(RecursiveRejectionWithoutReplacement()), Widths((2, 2))),
    (TopDown(NaiveMatch(WithoutReplacement())), Widths((2, 2))),
    (TopDown(NaiveMatch(TopK())), Widths((4, 2, 1))),
    (TopDown(TopThenSampleRule()), Widths((2, 2))),
    (TopDown(Optimal(WithoutReplacement())), Widths((2, 1))),
    (TopDown(RecursiveRejection(Product())), Widths((2, 1))),
    (BottomUp(RecursiveRejection()), Widths((2, 1, 1))),
    (BottomUp(RecursiveRejection(Product())), Widths((2, 1))),
    (TraversalVerification(), Widths((2, 2))),
    (Valued(), Widths((2, 2))),
    (BlockVerification(), Chain(3)),
    (ByShape(), Chain(3)),
]
each_rule = pytest.mark.parametrize(
    ("verifier", "policy"), RULES, ids=lambda one: f"{one.name} {one.scheme.name}" if hasattr(one, "scheme") else ""
)


def world_for(kind: type[DeepWorld], scheme: Scheme, seed: int) -> DeepWorld:
    return kind.random(seed, members=2 if isinstance(scheme, Product) else 0)


@pytest.mark.long(6)
@each_rule
def test_drafts_that_the_target_does_not_have_leave_the_law_as_it_is(
    verifier: PathVerifier, policy: TreePolicy
) -> None:
    for seed in (5, 2):
        world = world_for(StrangeWorld, verifier.scheme, seed)
        draft, chance = every_growth(world, verifier.scheme, policy)
        drawn = at_the_door(draft, verifier.scheme, policy)
        strange = ((drawn.tree.tokens == TOKENS) & drawn.tree.valid).any(dim=-1)
        assert drawn.failure is not None and 0.05 < float(chance @ strange.double()) <= 1 + 1e-9
        torch.testing.assert_close(law_of(world, verifier, drawn, chance), world.joint, rtol=0, atol=1e-9)


@each_rule
def test_rows_that_are_no_laws_leave_the_law_as_it_is(verifier: PathVerifier, policy: TreePolicy) -> None:
    """The row below one token is unusable, so that what was drawn before decides whether there is a failure."""
    world = world_for(DeepWorld, verifier.scheme, 5)
    draft, chance = every_growth(world, verifier.scheme, policy)
    wrong = (draft.tree.tokens == 1) & (draft.tree.depth > 0)
    for value in (torch.nan, -0.2, 0.7):
        rows = wrong.view(*wrong.shape, *[1] * (draft.probs.dim() - 2))
        kept = at_the_door(bent(draft, probs=draft.probs.masked_fill(rows, value)), verifier.scheme, policy)
        assert kept.failure is not None
        torch.testing.assert_close(law_of(world, verifier, kept, chance), world.joint, rtol=0, atol=1e-9)


def test_the_enumeration_notices_whole_drafts_that_are_dropped_for_what_was_drawn() -> None:
    world, verifier, policy = DeepWorld.random(5), TopDown(RecursiveRejection()), Widths((2, 1, 1))
    draft, chance = every_growth(world, verifier.scheme, policy)
    wrong = ((draft.tree.tokens == 1) & (draft.tree.depth > 0)).any(dim=-1, keepdim=True)
    dropped = replace(draft, tree=replace(draft.tree, valid=draft.tree.valid & ~(wrong & (draft.tree.depth > 0))))
    law = law_of(world, verifier, dropped, chance)
    assert float((law - world.joint).abs().sum()) / 2 > 0.03


# The same through the engine.

SMALL, FEW = 4, 2
START = [2, 0, 3, 2]
HOT = SamplingParams(temperature=2.5)


@dataclass
class Strange(Drafter):
    """Draws with `grow` from fixed rows in which half of the mass lies on ids that the target does not have."""

    name = "strange"

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> None: ...

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        listed, row = torch.tensor([1, SMALL, 0, -4, 3]), torch.tensor([0.2, 0.25, 0.2, 0.25, 0.1])

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            size = frontier.tokens.shape
            return listed.expand(*size, len(listed)), row.expand(*size, len(row))

        return grow(text.last(), policy, scheme, propose, noise), None

    def commit(self, state: None, step: Step) -> None: ...


class Refusing(HuggingFaceModel):
    """A draft model that raises when it is to score a token; one that was drawn, not one of the prompt."""

    def __init__(self, model: PreTrainedModel, token: int) -> None:
        super().__init__(model)
        self.token = token

    def forward(self, tokens: Tensor, *inputs: Any, **options: Any) -> Any:
        if tokens.shape[1] == 1 and bool((tokens == self.token).any()):
            raise RuntimeError("not this one")
        return super().forward(tokens, *inputs, **options)


def law_of_texts() -> Tensor:
    law = torch.ones(1, dtype=torch.float64)
    for length in range(FEW):
        history = torch.tensor([[*START, *text] for text in product(range(SMALL), repeat=length)])
        with torch.no_grad():
            logits = target(SMALL)(input_ids=history, use_cache=False).logits[:, -1]
        law = (law.unsqueeze(-1) * (logits / HOT.temperature).softmax(dim=-1)).flatten()
    return law


def p_value(counts: Tensor) -> float:
    expected = law_of_texts() * counts.sum()
    assert float(expected.min()) > 5
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()), SMALL**FEW - 1))


def counted(rows: list[list[int]]) -> Tensor:
    return torch.tensor([SMALL * first + second for first, second in rows]).bincount(minlength=SMALL**FEW).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "policy"),
    [
        (BlockVerification(IID()), Chain(2)),
        (TopDown(RecursiveRejectionWithoutReplacement()), Widths((2, 1))),
        (TopDown(RecursiveRejection(Product())), Widths((2, 1))),
        (SharedNoise(), Chain(2)),
    ],
    ids=["block", "tree", "product", "shared noise"],
)
def test_texts_with_strange_drafts_follow_the_target(verifier: Any, policy: TreePolicy) -> None:
    """If the engine is exact, this fails for one choice of seeds in a million."""
    drafter = Several() if isinstance(verifier.scheme, Product) else Strange()
    with pytest.warns(RuntimeWarning, match=r"The strange drafter failed \(InvalidDraft: The draft has the token -?4"):
        output = polydraft.generate(
            target(SMALL),
            torch.tensor([START]),
            attention_mask=torch.ones(1, len(START), dtype=torch.int64),
            drafter=drafter,
            verifier=verifier,
            policy=policy,
            temperature=HOT.temperature,
            top_k=0,
            seed=8,
            max_new_tokens=FEW,
            num_return_sequences=3000,
        )
    assert p_value(counted(output.sequences[:, len(START) :].tolist())) > FALSE_ALARM_RATE
    assert output.statistics.accepted > 200


class Several(Strange):
    """The same with two rows for each node."""

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        text, scheme, policy, noise = request.text, request.scheme, request.policy, request.noise
        listed = torch.tensor([1, SMALL, 0, -4, 3])
        rows = torch.tensor([[0.2, 0.25, 0.2, 0.25, 0.1], [0.5, 0.0, 0.1, 0.3, 0.1]])

        def propose(frontier: Frontier) -> tuple[Tensor, Tensor]:
            size = frontier.tokens.shape
            return listed.expand(*size, len(listed)), rows.expand(*size, *rows.shape)

        return grow(text.last(), policy, scheme, propose, noise), None


def one_by_one(drafter: Drafter, samples: int) -> tuple[Tensor, int, int]:
    """Write texts by themselves, so that no failure comes of another text; return failures and accepted drafts too."""
    rows, failures, accepted = list[list[int]](), 0, 0
    door = HuggingFaceModel(target(SMALL))
    prompt = Text(torch.tensor([START]), torch.tensor([len(START)]))
    for seed in range(samples):
        endings = (Ending(len(START) + FEW),)
        method = Method(drafter, BlockVerification(IID()), Chain(2))
        setup = Setup(door, method, prompt, (TargetLaw(HOT),), endings)
        run = Run(setup, Noise.from_seed(1000 + seed, 1)).exhaust()
        rows.append(run.new_tokens[0])
        failures += run.statistics.fallback != ""
        accepted += run.statistics.accepted
    return counted(rows), failures, accepted


@dataclass
class Dropping(Strange):
    """Fails behind growth because of what it drew; it is lost if it has drawn anything else."""

    more: bool = False

    def draft(self, state: None, request: DraftRequest) -> tuple[Draft, None]:
        noise = request.noise
        draft, after = super().draft(state, request)
        if self.more:
            noise.uniform(1)
        if int(draft.tree.tokens[0, 1]) in (1, SMALL):
            raise RuntimeError("not this one")
        return draft, after


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .* drafter failed:RuntimeWarning")
def test_single_texts_follow_the_target_where_drafts_fail_for_what_was_drawn() -> None:
    """If the engine is exact, this fails for two choices of seeds in a million."""
    raising = ModelDrafter(Refusing(perturbed(target(SMALL), 0.1), 1))
    for drafter in (Strange(), raising, Dropping()):
        counts, failures, accepted = one_by_one(drafter, 2300)
        assert p_value(counts) > FALSE_ALARM_RATE
        assert failures > 230 and accepted > 115
    assert p_value(one_by_one(Dropping(more=True), 2300)[0]) < FALSE_ALARM_RATE, "the test has the power to see it"
