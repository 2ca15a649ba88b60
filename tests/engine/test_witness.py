"""What a planner is told of the drafts' chances."""

import pytest
import torch
from doubles import perturbed, tiny_model

import polydraft
from polydraft.drafters import ModelDrafter, NgramDrafter
from polydraft.engine import Planner
from polydraft.engine.wrappers.witness import Outlook, Witness, keeps_overlaps, outlook
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise
from polydraft.schemes import IID, Product, TopK, TopThenIID
from polydraft.trees import Chain, Draft, TreePolicy, Verdict, Widths
from polydraft.verifiers import (
    BlockVerification,
    ByShape,
    NaiveMatch,
    Optimal,
    RecursiveRejection,
    SharedNoise,
    SpeculativeSampling,
    TopDown,
    TreeVerifier,
)


class Notes:
    """A verifier that keeps what it was given."""

    def __init__(self, verifier: TreeVerifier) -> None:
        self.verifier, self.scheme = verifier, verifier.scheme
        self.name, self.lossless = verifier.name, verifier.lossless
        self.seen: list[tuple[Draft, torch.Tensor]] = []

    def verify(self, draft: Draft, target_probs: torch.Tensor, noise: Noise) -> Verdict:
        self.seen.append((draft, target_probs))
        return self.verifier.verify(draft, target_probs, noise)


def drafts(
    verifier: TreeVerifier, policy: TreePolicy, temperature: float, size: int | None
) -> list[tuple[Draft, torch.Tensor]]:
    target, notes = tiny_model(seed=1), Notes(verifier)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.3)), shortlist_size=size)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"temperature": temperature, "max_new_tokens": 6, "seed": 1}
    polydraft.generate(target, prompt, drafter=drafter, verifier=notes, policy=policy, **options)
    return notes.seen


@pytest.mark.parametrize("size", [None, 5])
def test_the_chances_of_a_chain_are_the_overlaps_at_all_its_nodes(size: int | None) -> None:
    for draft, target in drafts(TopDown(SpeculativeSampling()), Chain(3), 1.0, size):
        dense = torch.zeros_like(target).scatter_add(-1, draft.shortlist.clamp_min(0), draft.probs)
        overlaps = torch.minimum(dense, target).sum(dim=-1)[:, :3]
        found = outlook(draft, target)
        assert found is not None and found.faced == 3
        assert found.won == pytest.approx(float(overlaps.sum(dim=-1).mean()), abs=1e-5)


def test_where_chances_are_not_plain_there_is_no_outlook() -> None:
    (tree, target), *_ = drafts(TopDown(RecursiveRejection(IID())), Widths((2, 1)), 1.0, None)
    assert outlook(tree, target) is None
    (several, target), *_ = drafts(TopDown(RecursiveRejection(Product())), Chain(2), 1.0, None)
    assert outlook(several, target) is None
    assert outlook(Draft.nothing(torch.tensor([1])), target[:1, :1]) is None


def test_only_rules_that_accept_by_overlap_have_an_outlook() -> None:
    keeping = (ByShape(), BlockVerification(), TopDown(SpeculativeSampling()), TopDown(RecursiveRejection()))
    others = (SharedNoise(), TopDown(NaiveMatch(IID())), TopDown(NaiveMatch(TopK())), TopDown(Optimal(TopThenIID(1))))
    assert all(keeps_overlaps(rule) for rule in keeping) and not any(keeps_overlaps(rule) for rule in others)


def test_a_witness_decides_nothing() -> None:
    plain = TopDown(SpeculativeSampling())
    for draft, target in drafts(plain, Chain(3), 1.0, None):
        witness = Witness(plain)
        told, own = (one.verify(draft, target, Noise.from_seed(3, len(target))) for one in (witness, plain))
        assert torch.equal(told.path, own.path) and torch.equal(told.next_token, own.next_token)
        assert witness.outlook == outlook(draft, target)


def test_a_planner_is_told_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Outlook | None] = []
    learn = Planner.learn

    def noted(self: Planner, tokens: float, seconds: float, outlook: Outlook | None = None) -> None:
        told.append(outlook)
        learn(self, tokens, seconds, outlook)

    monkeypatch.setattr(Planner, "learn", noted)
    target, prompt = tiny_model(seed=1), torch.tensor([[1, 2, 3]])
    options = {"temperature": 1.0, "max_new_tokens": 100, "seed": 1}
    draft = tiny_model(seed=2, num_hidden_layers=1)
    polydraft.generate(target, prompt, drafter=draft, policy=Planner((Chain(2),)), **options)
    known = [one for one in told if one is not None]
    assert known and all(one.faced == 2 and 0 < one.won < 2 for one in known)
    told.clear()
    polydraft.generate(target, prompt, drafter=NgramDrafter(), policy=Planner((Chain(3),)), **options)
    assert told and not any(told)


def test_chances_weigh_more_than_one_result() -> None:
    unlucky, lucky = Planner((Chain(4),)), Planner((Chain(4),))
    for planner in (unlucky, lucky):
        planner.opens(length=10, left=100, rows=1, relative=0.05, sampled=True)
    for planner, tokens, won in ((unlucky, 1, 3.4), (lucky, 3, 0.2)):
        planner.learn(tokens, 1.5, Outlook(won, 4))
        planner.learn(1, 1.0)
    assert unlucky.current == 1 and lucky.current == 0
