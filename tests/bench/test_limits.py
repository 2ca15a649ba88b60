"""The measurements: no rule above its optimum, the facts of temperature 0, and agreement with direct computation."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer
from torch import Tensor

from polydraft.bench import Prompt
from polydraft.bench.prompts.prompt import encode, seed_of
from polydraft.catalogue import parse_policy
from polydraft.drafters import Drafter, ModelDrafter, NgramDrafter, NoDraft, PredictedDrafter
from polydraft.engine import generate
from polydraft.errors import ContextOverflow, InvalidParameter
from polydraft.models import HuggingFaceModel, Pair
from polydraft.probs import Noise, SamplingParams, overlap, shortlist
from polydraft.schemes import IID, TopK, TopThenIID, WithoutReplacement
from polydraft.trees import BestFirst, Chain, Fixed, TreeShape, Widths
from polydraft.verifiers import (
    FAMILIES,
    BottomUp,
    Lenient,
    NaiveMatch,
    Optimal,
    RecursiveRejection,
    SpeculativeSampling,
    TopDown,
    Valued,
    dual_values,
    expected_accepted,
)
from polydraft_lab.limits import LimitsSettings, Models, NodeCase, Record, fitting, measure, node_cases, tree_cases
from polydraft_lab.limits.branching import accepted_on_trees, draw_trees, every, rows_at_leaves, score_trees
from polydraft_lab.limits.cases import ANY_RULE, bounds_on
from polydraft_lab.limits.measuring import OPTIMUM, acceptance_at_nodes
from polydraft_lab.limits.positions import Sample, draft_rows, generate_sample, rows_on_atoms


def sampled(models: Models, prompt: Prompt, temperature: float, tokens: int = 7) -> Sample:
    ids = encode(models.pair, prompt, 64)
    return generate_sample(models, ids, temperature, tokens, seed_of(prompt, 0), room=64)


def test_every_case_is_measured_and_none_is_above_its_optimum(records: list[Record], settings: LimitsSettings) -> None:
    expected = {(case.scheme.name, str(k)) for case in node_cases() for k in settings.drafts if k <= case.most}
    for record in records:
        assert {(scheme, k) for scheme, by_k in record.nodes.items() for k in by_k} == expected
        for by_k in record.nodes.values():
            for rules in by_k.values():
                best = rules[OPTIMUM] / record.positions
                assert best <= 1 + 1e-9
                assert all(0 <= value / record.positions <= best + 1e-9 for value in rules.values())


def test_rules_that_are_optimal_reach_the_optimum_and_others_do_not(records: list[Record]) -> None:
    optimal = {("top then sample", "top then sample"), ("spechub", "spechub"), ("top-k", "naive match")}
    behind: dict[tuple[str, str], float] = {}
    for record in records:
        for scheme, by_k in record.nodes.items():
            for rules in by_k.values():
                for rule, value in rules.items():
                    behind[scheme, rule] = max(behind.get((scheme, rule), 0.0), rules[OPTIMUM] - value)
    for (scheme, rule), gap in behind.items():
        if rule in (OPTIMUM, "optimal rule") or (scheme, rule) in optimal:
            assert gap < 1e-8, (scheme, rule)
        elif rule == "race":
            assert gap < 5e-3, scheme
        else:
            assert gap > 1e-3, (scheme, rule)


def test_a_lossy_rule_would_be_seen_above_the_optimum(models: Models, prompts: list[Prompt]) -> None:
    draft, target = rows_on_atoms(sampled(models, prompts[0], 0.8), 0.8, 0.8, 8)
    rules = acceptance_at_nodes(draft, target, (1,), [NodeCase("lenient", Lenient(0.5))])["iid"]["1"]
    assert rules["lenient"] > rules[OPTIMUM] + 0.1


def test_more_drafts_are_never_worse_at_the_optimum(records: list[Record], settings: LimitsSettings) -> None:
    for record in records:
        for scheme, by_k in record.nodes.items():
            best = [by_k[str(k)][OPTIMUM] for k in settings.drafts if str(k) in by_k]
            assert all(more >= fewer - 1e-9 for fewer, more in pairwise(best)), scheme


def test_one_draft_of_any_random_scheme_accepts_the_overlap(models: Models, prompts: list[Prompt]) -> None:
    certain = (TopK, TopThenIID)  # their first draft is the likeliest token
    draft, target = rows_on_atoms(sampled(models, prompts[0], 0.8), 0.8, 0.8, 8)
    found = acceptance_at_nodes(
        draft, target, (1,), [one for one in node_cases() if not isinstance(one.scheme, certain)]
    )
    for by_k in found.values():
        assert by_k["1"][OPTIMUM] == pytest.approx(float(overlap(target, draft).sum()))


def test_temperature_zero_asks_whether_the_targets_token_is_among_the_likeliest(
    models: Models, prompts: list[Prompt], records: list[Record], settings: LimitsSettings
) -> None:
    record = next(one for one in records if one.key == ("code", "1", 0.0))
    sample = sampled(models, prompts[0], 0.0)
    wanted, offered = sample.target.logits.argmax(-1), sample.draft.logits.topk(8).indices
    for k in settings.drafts:
        among_first = float((offered[:, :k] == wanted.unsqueeze(-1)).any(-1).sum())
        first = float((offered[:, 0] == wanted).sum())
        for scheme, by_k in record.nodes.items():
            expected = first if scheme == "iid" else among_first
            if str(k) in by_k and (k <= 2 or scheme != TopThenIID(1).name):
                assert by_k[str(k)][OPTIMUM] == pytest.approx(expected, abs=1e-9), scheme
        assert record.nodes["top-k"][str(k)]["naive match"] == pytest.approx(among_first, abs=1e-9)


def test_the_limit_of_draft_temperature_zero_is_the_limit(models: Models, prompts: list[Prompt]) -> None:
    sample = sampled(models, prompts[0], 0.8)
    logits = sample.draft.logits - sample.draft.logits.amax(-1, keepdim=True)
    spaced = -logits.argsort(descending=True).argsort().double()  # no near-ties, so that a cold softmax is the limit
    tokens, cold = draft_rows(spaced, 0.02, 8)
    limit_tokens, limit = draft_rows(spaced, 0.0, 8)
    assert torch.equal(tokens, limit_tokens)
    for scheme in (IID(), WithoutReplacement()):
        case = [NodeCase("naive match", NaiveMatch(scheme))]
        target = torch.full((len(limit), 9), 1 / 9, dtype=torch.float64)
        rates = [
            acceptance_at_nodes(torch.nn.functional.pad(one, (0, 1)), target, (2,), case)[scheme.name]["2"]
            for one in (cold, limit)
        ]
        assert rates[0] == pytest.approx(rates[1], abs=1e-9)


def test_equal_positions_are_computed_once_and_counted_as_often_as_they_are(
    models: Models, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = rows_on_atoms(sampled(models, prompts[0], 0.8), 0.8, 0.8, 8)
    seen: list[int] = []
    original = RecursiveRejection.marginal

    def watched(self: RecursiveRejection, rows: Tensor, *rest: Any) -> Tensor:
        seen.append(len(rows))
        return original(self, rows, *rest)

    monkeypatch.setattr(RecursiveRejection, "marginal", watched)
    case = [NodeCase("r", RecursiveRejection())]
    once = acceptance_at_nodes(draft, target, (2,), case)["iid"]["2"]
    both = acceptance_at_nodes(draft.repeat(2, 1), target.repeat(2, 1), (2,), case)["iid"]["2"]
    assert seen == [len(draft), len(draft)]
    assert both == pytest.approx({rule: 2 * value for rule, value in once.items()})


def test_the_rows_are_the_models_own(models: Models, prompts: list[Prompt]) -> None:
    sample = sampled(models, prompts[1], 0.8)
    tokens = sample.tokens.unsqueeze(0)
    assert models.pair.draft is not None
    with torch.inference_mode():
        wanted, offered = (
            one(input_ids=tokens).logits[0, sample.first :] for one in (models.pair.target, models.pair.draft)
        )
    listed, probs = shortlist(offered, SamplingParams(temperature=0.5), 8)
    draft, target = rows_on_atoms(sample, 0.8, 0.5, 8)
    torch.testing.assert_close(draft[:, :-1], probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(target[:, :-1], (wanted / 0.8).softmax(-1).gather(-1, listed), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(target.sum(-1), torch.ones(len(target), dtype=torch.float64))
    assert len(draft) == sample.positions == 7


def test_a_text_depends_on_its_own_name_and_seed_only(
    models: Models, prompts: list[Prompt], settings: LimitsSettings
) -> None:
    alone = list(measure(models, prompts[2:], replace(settings, temperatures=(0.8,), drafts=(2,), tree_every=0)))
    after = list(measure(models, prompts, replace(settings, temperatures=(0.8,), drafts=(2,), tree_every=0)))
    assert alone == after[2:] and alone[0].tree_positions == 0 and alone[0].trees == {}
    texts = [sampled(models, one, 1.2).tokens[-6:].tolist() for one in (prompts[0], replace(prompts[0], name="2"))]
    assert texts[0] != texts[1]


class TestTrees:
    def test_every_fitting_case_is_measured(self, records: list[Record], settings: LimitsSettings) -> None:
        for record in records:
            assert record.tree_positions == 3  # of 7 positions every third
            for shape, chain in (("chain:2", True), ("2,1", False)):
                found = {(scheme, rule) for scheme, rules in record.trees[shape].items() for rule in rules}
                own = {(c.verifier.scheme.name, c.label) for c in tree_cases() if c.chain == chain}
                drawn = {IID().name} | ({WithoutReplacement().name} if not chain else set())
                assert found >= own and {scheme for scheme, rule in found - own if ANY_RULE in rule} >= drawn
                kept = [
                    v for rules in record.trees[shape].values() for name, v in rules.items() if ANY_RULE not in name
                ]
                assert all(0 <= v <= 2 * 3 + 1e-9 for v in kept)

    def test_no_rule_is_above_the_bound_on_any(self, models: Models, prompts: list[Prompt]) -> None:
        """On average over 200 trees, with three standard errors to spare; drafts without a drawn law have no bound."""
        for scheme in (IID(), WithoutReplacement()):
            sample = sample_with_room(models, prompts[0], 3000)
            roots = sample.first + torch.zeros(200, dtype=torch.int64)
            trees = draw_trees(sample, roots, Widths((2, 1)), scheme, 0.8, 8, noise(200))
            rows = score_trees(sample, roots, trees, 0.8)
            values = dual_values(trees, rows, scheme)
            least = float(values.mean() + 3 * values.std() / 200**0.5)
            for rule in (Valued(scheme), BottomUp(Optimal(scheme))):
                assert 0 < float(expected_accepted(rule, trees, rows).mean()) < least
        assert len(bounds_on(Chain(2), IID())) == len(FAMILIES) and not bounds_on(Chain(2), TopK())
        assert not bounds_on(BestFirst(4), IID())

    def test_leaves_above_the_last_depth_are_priced_by_rows_of_their_own(
        self, models: Models, prompts: list[Prompt]
    ) -> None:
        sample, policy = sample_with_room(models, prompts[0], 3000), Fixed(TreeShape(((2,), (1,))))
        roots = sample.first + torch.zeros(60, dtype=torch.int64)
        drawn = draw_trees(sample, roots, policy, IID(), 0.8, 8, Noise.from_seed(sample.first, 60))
        whole = rows_at_leaves(sample, roots, drawn, 0.8, 8)
        assert float(drawn.probs[:, 2].sum()) == 0 and float(whole.probs[:, 2].sum(-1).min()) > 0.999
        assert torch.equal(whole.probs[:, :2], drawn.probs[:, :2])
        same = (drawn.tree.tokens[:, 1] == drawn.tree.tokens[:, 2]).nonzero().flatten()
        assert len(same) and torch.equal(whole.shortlist[same, 1], whole.shortlist[same, 2])
        torch.testing.assert_close(whole.probs[same, 1], whole.probs[same, 2])
        found = accepted_on_trees(sample, roots, policy, tree_cases(), (0.8, 0.8), 8, 0)[IID().name]
        rows = score_trees(sample, roots, drawn, 0.8)
        kept = expected_accepted(Valued(IID()), drawn, rows)
        assert found["by value"] == pytest.approx(float(kept.sum()))
        for name, family in zip(bounds_on(policy, IID()), FAMILIES, strict=True):
            values = dual_values(whole, rows, IID(), family)
            assert found[name] == pytest.approx(float(values.sum()))
            above = values - kept  # of the same trees: four to six standard errors
            assert float(above.mean()) > 3 * float(above.std()) / 60**0.5

    def test_a_chain_token_by_token_is_the_product_of_overlaps_on_average(
        self, models: Models, prompts: list[Prompt]
    ) -> None:
        sample = sampled(models, prompts[0], 0.8)
        draft, target = rows_on_atoms(sample, 0.8, 0.8, 8)
        roots = sample.first + torch.zeros(1000, dtype=torch.int64)
        trees = draw_trees(sample_with_room(models, prompts[0], 2000), roots, Chain(1), IID(), 0.8, 8, noise(1000))
        rows = score_trees(sample_with_room(models, prompts[0], 2000), roots, trees, 0.8)
        found = expected_accepted(TopDown(SpeculativeSampling()), trees, rows)
        error = float(found.std()) / 1000**0.5
        assert float(found.mean()) == pytest.approx(float(overlap(target, draft)[0]), abs=5 * error)

    def test_chunks_of_roots_change_the_drawn_trees_only(
        self, models: Models, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sample = sampled(models, prompts[0], 0.0)
        arguments = (sample, every(sample, 2), parse_policy("2,1"), tree_cases(), (0.0, 0.0), 8, 0)
        whole = accepted_on_trees(*arguments)
        monkeypatch.setattr("polydraft_lab.limits.branching.ROOM", 1)
        pieces = accepted_on_trees(*arguments)
        assert {scheme: pytest.approx(rules) for scheme, rules in whole.items()} == pieces


def sample_with_room(models: Models, prompt: Prompt, room: int) -> Sample:
    ids = encode(models.pair, prompt, 64)
    return generate_sample(models, ids, 0.8, 7, seed_of(prompt, 0), room)


def noise(rows: int) -> Noise:
    return Noise.from_seed(0, rows)


class TestPlansAndPrompts:
    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"temperatures": (0.5, -1.0)}, "temperature must be a finite number >= 0, but is -1.0"),
            ({"draft_temperature": float("nan")}, "temperature must be a finite number >= 0, but is nan"),
            ({"temperatures": ()}, "temperatures must be different values, at least one"),
            ({"temperatures": (0.5, 0.5)}, "temperatures must be different values"),
            ({"drafts": (0,)}, "Numbers of drafts must lie between 1 and shortlist, 8: 0"),
            ({"drafts": (9,)}, "Numbers of drafts must lie between 1 and shortlist, 8: 9"),
            ({"max_tokens": 0}, "max_tokens must be an integer >= 1, but is 0"),
            ({"tree_every": -1}, "tree_every must be an integer >= 0, but is -1"),
            ({"shapes": ("2,x",)}, "A tree is written as children per depth"),
        ],
    )
    def test_values_outside_their_range(self, settings: LimitsSettings, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(InvalidParameter, match=text):
            replace(settings, **changes)

    def test_a_pair_without_draft_model(self) -> None:
        with pytest.raises(InvalidParameter, match="need a draft model"):
            Models.of(Pair(tiny_model(), None, tiny_tokenizer()))

    def test_tasks_take_turns_and_long_prompts_are_left_out(
        self, models: Models, prompts: list[Prompt], settings: LimitsSettings
    ) -> None:
        long = Prompt("9", "tale", "x" * 128)
        order = [prompts[0], prompts[2], long, prompts[1]]
        assert fitting(models, order, settings) == [prompts[0], prompts[1], prompts[2]]
        with pytest.raises(ContextOverflow, match="None of the 1 prompts fits into a context of 128 tokens"):
            fitting(models, [long], settings)

    def test_a_text_ends_with_the_context(self, models: Models, settings: LimitsSettings) -> None:
        (record,) = measure(models, [Prompt("1", "a", "x" * 126)], replace(settings, temperatures=(0.0,), drafts=(2,)))
        assert record.positions == 2

    def test_only_the_beginning_of_an_excerpt_is_the_prompt(self, models: Models) -> None:
        assert encode(models.pair, Prompt("1", "a", "abcdef", excerpt=True), 4).shape == (1, 4)
        assert encode(models.pair, Prompt("1", "a", "abcdef"), 4).shape == (1, 6)


def drafts_of(models: Models, drafter: Drafter) -> Models:
    return Models.of(models.pair, drafter)


@pytest.mark.slow
def test_a_draft_models_drafts_are_accepted_as_its_rows_say(
    models: Models, prompts: list[Prompt], settings: LimitsSettings, records: list[Record]
) -> None:
    """Above temperature 0, where the drafter's rows are the draft model's; the text is that of decoding alone."""
    drafter = ModelDrafter(HuggingFaceModel(models.pair.draft))
    own = replace(settings.suited(drafter), temperatures=(0.8,))
    found = {one.key: one for one in measure(drafts_of(models, drafter), prompts, own)}
    assert len(found) == 3
    for record in (one for one in records if one.temperature == 0.8):
        mine = found[record.key]
        assert (mine.positions, mine.tree_positions) == (record.positions, record.tree_positions)
        for scheme, by_k in record.nodes.items():
            for k, rules in by_k.items():
                assert mine.nodes[scheme][k] == pytest.approx(rules, abs=1e-4), (scheme, k)
        for shape, by_scheme in record.trees.items():
            for scheme, rules in by_scheme.items():
                assert {*mine.trees[shape][scheme]} >= {name for name in rules if ANY_RULE not in name}
                assert all(0 < value <= 2 * record.tree_positions for value in mine.trees[shape][scheme].values())


def test_tokens_from_outside_are_accepted_as_often_as_the_target_writes_them(
    models: Models, prompts: list[Prompt], settings: LimitsSettings
) -> None:
    ids = encode(models.pair, prompts[0], 64)
    written = generate(models.pair.target, ids, drafter="none", max_new_tokens=9)
    drafter = PredictedDrafter(written.sequences[0, ids.shape[1] :].tolist())
    own = replace(settings.suited(drafter), temperatures=(0.0,))
    (record,) = measure(drafts_of(models, drafter), prompts[:1], own)
    assert record.positions == 7 and record.tree_positions == 3
    assert record.nodes == {"given": {k: {OPTIMUM: 7.0, "naive match": 7.0} for k in "123"}}
    assert record.trees == {shape: {"given": {"naive match": 6.0}} for shape in ("chain:2", "2,1")}
    (other,) = measure(drafts_of(models, NgramDrafter()), prompts[:1], own)
    assert 0 <= other.nodes["given"]["1"][OPTIMUM] < 7  # where nothing is found, nothing is accepted


class Fails(NgramDrafter):
    """A lookup that fails."""

    def draft(self, *_: Any) -> Any:
        """Fail."""
        raise OSError("no more")


def test_drafters_that_fail_or_draft_nothing_are_not_measured(
    models: Models, prompts: list[Prompt], settings: LimitsSettings
) -> None:
    with pytest.warns(RuntimeWarning, match="no more"), pytest.raises(InvalidParameter, match="failed: OSError: no"):
        next(iter(measure(drafts_of(models, Fails()), prompts, settings.suited(Fails()))))
    with pytest.raises(InvalidParameter, match="drafts by no scheme"):
        settings.suited(NoDraft())


def test_a_models_own_filters_do_not_change_what_is_measured(prompts: list[Prompt]) -> None:
    """Rules are measured on the law at a temperature, whatever the target's generation settings say beside."""
    target = tiny_model("llama", 101)
    pair = Pair(target, perturbed(target, 0.1), tiny_tokenizer())
    drafter = ModelDrafter(HuggingFaceModel(pair.draft))
    own = LimitsSettings((0.8,), drafts=(1,), max_tokens=4, shortlist=8, tree_every=0).suited(drafter)
    (plain,) = measure(Models.of(pair, drafter), prompts[:1], own)
    target.generation_config.update(do_sample=True, top_p=0.3, min_p=0.2, repetition_penalty=1.4, top_k=3)
    (found,) = measure(Models.of(pair, drafter), prompts[:1], own)
    assert found == plain


def test_trees_that_a_scheme_cannot_draw_are_no_part_of_a_record(models: Models, prompts: list[Prompt]) -> None:
    drafter = ModelDrafter(HuggingFaceModel(models.pair.draft))
    own = LimitsSettings((0.8,), drafts=(1,), max_tokens=4, shortlist=8, tree_every=2, shapes=("4,2",)).suited(drafter)
    (record,) = measure(Models.of(models.pair, drafter), prompts[:1], own)
    assert {name: {*rules} for name, rules in record.trees["4,2"].items()} == own.tree_layout()["4,2"]
    assert "spechub" not in record.trees["4,2"] and "spechub" in record.nodes
