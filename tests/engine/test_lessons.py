"""What a step shows of the chances of its drafts."""

import pytest
import torch
from doubles import perturbed, tiny_model

import polydraft
from polydraft.drafters import LookupFirst, ModelDrafter, NgramDrafter
from polydraft.engine import TargetLaw
from polydraft.models import HuggingFaceModel
from polydraft.planning import Opening
from polydraft.planning.lessons import ASIDE, TELLING, keeps_overlaps, lessons_of
from polydraft.probs import Noise, SamplingParams
from polydraft.schemes import IID, TopK, TopThenIID
from polydraft.trees import Chain, Draft, LearningPolicy, Lookup, Piece, TreePolicy, Verdict, Widths
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

LAW = TargetLaw(SamplingParams(0.0))


class Notes:
    """A verifier that keeps what it was given."""

    def __init__(self, verifier: TreeVerifier) -> None:
        self.verifier, self.scheme = verifier, verifier.scheme
        self.name, self.lossless = verifier.name, verifier.lossless
        self.seen: list[tuple[Draft, torch.Tensor, Verdict]] = []

    def verify(self, draft: Draft, target_probs: torch.Tensor, noise: Noise) -> Verdict:
        self.seen.append((draft, target_probs, self.verifier.verify(draft, target_probs, noise)))
        return self.seen[-1][2]


class Told(LearningPolicy):
    """A planner that takes one tree and keeps what it is told."""

    weighs_lookups = True

    def __init__(self, policy: TreePolicy, looks_up: bool = True) -> None:
        self.shape = policy.shape
        self.looks_up, self.told, self.opened = looks_up, [], []

    def suited(self, usual: TreePolicy) -> None:
        self.usual = usual

    @property
    def uses_lookups(self) -> bool:
        return True

    def rows_with_lookup(self, found: list[Lookup]) -> tuple[int, ...]:
        return tuple(row for row, one in enumerate(found) if one.parents and self.looks_up)

    def texts_opened(self, opening: Opening) -> None:
        self.opened.append(opening)

    def learn(self, lessons: tuple, spent: object, scored: int) -> None:
        self.told.append((lessons, spent, scored))


def steps(
    verifier: TreeVerifier, policy: TreePolicy, temperature: float, size: int | None
) -> list[tuple[Draft, torch.Tensor, Verdict]]:
    target, notes = tiny_model(seed=1), Notes(verifier)
    drafter = ModelDrafter(HuggingFaceModel(perturbed(target, 0.3)), shortlist_size=size)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    options = {"temperature": temperature, "max_new_tokens": 6, "seed": 1}
    polydraft.generate(target, prompt, drafter=drafter, verifier=notes, policy=policy, **options)
    return [one for one in notes.seen if one[0].tree.tokens.shape[1] > 1]  # a last token has no drafts


def learnt(rule: TreeVerifier, draft: Draft, target: torch.Tensor, verdict: Verdict, rows: tuple[int, ...]) -> tuple:
    gains = {row: verdict.kept[row] + 1 for row in rows}
    piece = Piece(tuple(range(len(target))), draft)
    return lessons_of([(piece, rule)], target, verdict, gains, [LAW.in_force] * len(target))


@pytest.mark.parametrize("size", [None, 5])
def test_the_chances_of_a_chain_are_the_overlaps_at_the_nodes_that_were_reached(size: int | None) -> None:
    rule = TopDown(SpeculativeSampling())
    for draft, target, verdict in steps(rule, Chain(3), 1.0, size):
        dense = torch.zeros_like(target).scatter_add(-1, draft.shortlist.clamp_min(0), draft.probs)
        overlaps = torch.minimum(dense, target).sum(dim=-1)[:, :3]
        lessons = learnt(rule, draft, target, verdict, (0, 1))
        for lesson, row, kept in zip(lessons, overlaps.tolist(), verdict.kept, strict=True):
            reached = min(3, kept + 1)
            assert [(depth, rank, weight) for depth, rank, _, weight in lesson.tried] == [
                (depth, 0, TELLING) for depth in range(reached)
            ]
            assert [chance for _, _, chance, _ in lesson.tried] == pytest.approx(row[:reached], abs=1e-5)
            assert len(lesson.judged) == reached and all(0 < sure <= 1 for _, sure, _ in lesson.judged)


def test_at_temperature_zero_every_node_tells_whether_the_targets_token_is_below_it() -> None:
    rule = TopDown(NaiveMatch(TopK()))
    for draft, target, verdict in steps(rule, Widths((2, 2)), 0.0, None):
        for row, lesson in enumerate(learnt(rule, draft, target, verdict, (0, 1))):
            best, tokens = target[row].argmax(dim=-1).tolist(), draft.tree.tokens[row].tolist()
            path = {0, *verdict.path[row, : verdict.kept[row]].tolist()}
            expected = []
            for node, below in enumerate([(1, 2), (3, 4), (5, 6)]):
                weight, depth = (1.0 if node in path else ASIDE), int(node > 0)
                for rank, child in enumerate(below):
                    expected.append((depth, rank, float(tokens[child] == best[node]), weight))
                    if tokens[child] == best[node]:
                        break
            assert sorted(lesson.tried) == sorted(expected)
            assert lesson.tokens == verdict.kept[row] + 1 and lesson.depth == 2 and lesson.law == LAW.in_force


def test_of_other_trees_the_results_are_told() -> None:
    rule = TopDown(RecursiveRejection(IID()))
    seen = set()
    for draft, target, verdict in steps(rule, Widths((2, 1)), 1.0, None):
        (lesson,) = learnt(rule, draft, target, verdict, (1,))
        path = verdict.path[1, : verdict.kept[1]].tolist()
        ranks = [one[1] for one in lesson.tried if one[2] == 1.0]
        assert ranks == [int(draft.tree.topology.rank[1, node]) for node in path]
        assert all(one[2] in (0.0, 1.0) and one[3] == 1.0 for one in lesson.tried)
        seen.add(len(path))
    assert len(seen) > 1


def test_texts_that_have_ended_teach_nothing() -> None:
    rule = TopDown(SpeculativeSampling())
    draft, target, verdict = steps(rule, Chain(3), 1.0, None)[0]
    assert len(learnt(rule, draft, target, verdict, (0, 1))) == 2
    assert learnt(rule, draft, target, verdict, (1,)) == learnt(rule, draft, target, verdict, (0, 1))[1:]


def test_only_rules_that_accept_by_overlap_tell_chances() -> None:
    keeping = (ByShape(), BlockVerification(), TopDown(SpeculativeSampling()), TopDown(RecursiveRejection()))
    others = (SharedNoise(), TopDown(NaiveMatch(IID())), TopDown(NaiveMatch(TopK())), TopDown(Optimal(TopThenIID(1))))
    assert all(keeps_overlaps(rule) for rule in keeping) and not any(keeps_overlaps(rule) for rule in others)


def test_a_planner_is_told_by_the_engine_who_drafted() -> None:
    target, prompt = tiny_model(seed=1), torch.tensor([[1, 2, 3, 1, 2, 3], [4, 5, 6, 7, 8, 9]])
    drafter = LookupFirst(ModelDrafter(HuggingFaceModel(perturbed(target, 0.3))), 2)
    options = {"temperature": 1.0, "max_new_tokens": 30, "seed": 1, "drafter": drafter}
    for looks_up in (True, False):
        told = Told(Chain(3), looks_up)
        run = polydraft.stream(target, prompt, policy=told, **options)
        blocks = [[one for one in block.rows.values() if one.drafted or not one.finish] for block in run]
        taught = [one for one in blocks if one]  # nothing is told of a token for which there was no room for drafts
        (opening,) = told.opened
        assert (opening.length, opening.left, opening.rows, opening.law) == (6, 30, 2, ("top_k=50",))
        assert told.usual == Chain(5)
        sources = {lesson.source for lessons, _, _ in told.told for lesson in lessons}
        assert sources == ({"", "lookup"} if looks_up else {""})
        assert len(told.told) == len(taught) >= run.statistics.steps - 2
        expected = sum(len(one.tokens) for rows in taught for one in rows)
        assert sum(one.tokens for lessons, _, _ in told.told for one in lessons) == expected
        assert all(spent.target > 0 and spent.rest > 0 for _, spent, _ in told.told)
    plain = Told(Chain(3))
    polydraft.generate(target, prompt[:1], policy=plain, drafter=NgramDrafter(), temperature=0.0, max_new_tokens=9)
    assert all(scored == 1 + lessons[0].depth for lessons, _, scored in plain.told)
