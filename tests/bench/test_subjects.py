"""Subjects of the benchmark: which passes, rules and arms are measured, and that the numbers are the models' own."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model

import polydraft_lab.subjects.planner as planning
from polydraft.bench import read_prompt_sets
from polydraft.bench.prompts.prompt import encode
from polydraft.catalogue import RuleLine, tables
from polydraft.engine import as_drafter
from polydraft.errors import InvalidParameter
from polydraft.models import Facts, Forward, LanguageModel, load_pair
from polydraft.probs import Noise, overlap
from polydraft.schemes import IID, Coupled, Given, Product, SpecHub, TopK, WithoutReplacement
from polydraft.trees import BestFirst, Chain, TreeShape, Widths
from polydraft.verifiers import (
    BottomUp,
    NaiveMatch,
    RecursiveRejection,
    SpeculativeSampling,
    TopDown,
    TreeVerifier,
)
from polydraft_lab.limits import Models
from polydraft_lab.subjects import (
    PlannerOptions,
    PlannerSetting,
    Rows,
    RulesSettings,
    check_room,
    measure_laws,
    measure_optima,
    measure_planner,
    measure_shares,
    node_rules_for,
    rows_of_texts,
    settings_named,
    time_passes,
    tree_rules_for,
)
from polydraft_lab.subjects.clock import one_thread
from polydraft_lab.subjects.laws import acceptance, optimum
from polydraft_lab.subjects.passes import PassSettings
from polydraft_lab.subjects.planner import PLAIN, PLANNER, compared, noisy, shuffled, side_by_side
from polydraft_lab.subjects.rows import rows_for
from polydraft_lab.subjects.shares import narrowed, tree_for

Heard = list[tuple[str, int, int]]
SMALL = RulesSettings((0.0, 0.8), (1, 3), ("2,1", "default"), 5, 8, vocabulary=40, nodes=3, repeats=2)


def hear(heard: Heard) -> Any:
    return lambda *told: heard.append(told)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let arms of the planner's comparison warm up by one token."""
    monkeypatch.setattr(planning, "WARM_UP", 1)


@pytest.fixture(scope="module")
def ids(models: Models) -> list[torch.Tensor]:
    return [torch.tensor([models.pair.tokenizer(text)["input_ids"]]) for text in ("def f(a):", "class A:")]


@pytest.fixture(scope="module")
def rows(models: Models, ids: list[torch.Tensor]) -> list[Rows]:
    return [rows_of_texts(models, ids, heat, SMALL) for heat in SMALL.temperatures]


@dataclass
class Recorder(LanguageModel):
    """A language model that notes what it is asked to score."""

    facts: Facts = Facts(7, 20, torch.device("cpu"))  # type: ignore[assignment]
    seen: list[dict[str, Any]] = field(default_factory=list)

    def new_cache(self, batch: int, capacity: int) -> int:
        return capacity

    def forward(self, tokens: Any, positions: Any, mask: Any, cache: Any, starts: Any) -> Forward:
        asked = {"tokens": tokens, "positions": positions, "mask": mask, "cache": cache, "starts": starts}
        self.seen.append(asked)
        return Forward(torch.zeros(*tokens.shape, self.facts.vocab_size), {})


def test_passes_score_so_many_tokens_behind_so_many_known_ones() -> None:
    model, heard = Recorder(), Heard()
    found = list(time_passes({"it": model}, PassSettings((4, 9), (1, 3), repeats=5), hear(heard)))
    assert [(one.known, one.width) for one in found] == [(4, 1), (4, 3), (9, 1), (9, 3)]
    assert all(one.passes == 5 and 0 < one.fastest <= one.milliseconds <= one.slowest for one in found)
    assert Counter((int(one["starts"]), one["tokens"].shape[1]) for one in model.seen) == {
        (known, width): 10 for known in (4, 9) for width in (1, 3)
    }
    for one in model.seen:
        known, width = int(one["starts"]), one["tokens"].shape[1]
        assert one["positions"].tolist() == [[*range(known, known + width)]] and one["cache"] == known + width
        assert one["mask"].shape == (1, width, known + width)
        assert one["mask"].sum(dim=-1).tolist() == [[*range(known + 1, known + width + 1)]]
        assert int(one["tokens"].min()) >= 0 and int(one["tokens"].max()) < 7
    assert heard == [("turns", number, 10) for number in range(1, 11)]


def test_models_and_widths_take_turns() -> None:
    order, models = [], {name: Recorder() for name in "ab"}
    for name, model in models.items():
        forward = model.forward
        model.forward = lambda *given, name=name, forward=forward: (  # type: ignore[method-assign]
            order.append((given[0].shape[1], name)),
            forward(*given),
        )[1]
    list(time_passes(models, PassSettings((4,), (1, 2), repeats=2)))
    assert order[::2] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")] * 2


def test_a_pass_of_a_real_model_is_timed_and_one_without_room_is_refused(models: Models) -> None:
    (one,) = time_passes({"target": models.target}, PassSettings((8,), (2,), repeats=1))
    assert (one.model, one.known, one.width) == ("target", 8, 2) and one.milliseconds > 0
    check_room({"target": models.target}, PassSettings((126,), (2,)))
    with pytest.raises(InvalidParameter, match="over 3 tokens after 126 does not fit into the context of target, 128"):
        check_room({"target": models.target}, PassSettings((126,), (1, 3)))


BAD_SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    (PassSettings, {"known": (0,)}, "known must be different numbers >= 1"),
    (PassSettings, {"widths": (2, 2)}, "widths must be different"),
    (PassSettings, {"repeats": 0}, "repeats must be at least 1, but is 0"),
    (RulesSettings, {"temperatures": (-1.0,)}, "temperature must be a finite number >= 0"),
    (RulesSettings, {"temperatures": (1.0, 1.0)}, "temperatures must be different values"),
    (RulesSettings, {"drafts": (65,)}, "between 1 and shortlist, 64"),
    (RulesSettings, {"trees": ("2,x",)}, "2,x"),
    (RulesSettings, {"trees": ()}, "trees must be different values, at least one"),
    (RulesSettings, {"vocabulary": 1}, "vocabulary must be an integer >= 2, but is 1"),
    (PlannerOptions, {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
]


@pytest.mark.parametrize(("kind", "values", "sentence"), BAD_SETTINGS)
def test_settings_out_of_range_are_refused(kind: type, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=sentence):
        kind(**values)


def test_rules_are_those_of_the_catalogue_with_all_that_a_draft_model_draws_by(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = as_drafter(models.pair.draft)
    found = node_rules_for(drafter)
    assert all(rule.lossless for rule in found) and {Given(), Coupled()}.isdisjoint(rule.scheme for rule in found)
    words = {line.word: {type(line.usual)} for line in tables.RULES if line.decides_at_nodes and line.usual.lossless}
    assert {type(rule) for rule in found} == set().union(*words.values())
    schemes = [rule.scheme for rule in found]
    assert schemes == sorted(schemes, key=schemes.index), "rules of a scheme come together"
    assert node_rules_for(drafter, ["speculative"]) == [SpeculativeSampling()]
    assert node_rules_for(drafter, ["naive", "recursive"], [Product()]) == [
        NaiveMatch(Product()),
        RecursiveRejection(Product()),
    ]
    assert [rule.lossless for rule in node_rules_for(drafter, ["typical"], [IID()])] == [False]
    assert node_rules_for(drafter, ["block"]) == node_rules_for(drafter, ["naive"], [Given()]) == []
    monkeypatch.setattr(tables, "RULES", (RuleLine("mine", NaiveMatch, (IID(), TopK())),))
    assert node_rules_for(drafter) == [NaiveMatch(IID()), NaiveMatch(TopK())]


def test_rules_for_trees_are_lifted_as_asked_for_and_whole_ones_are_taken_as_they_are(models: Models) -> None:
    drafter = as_drafter(models.pair.draft)
    down, up = (tree_rules_for(drafter, bottom_up=bottom_up) for bottom_up in (False, True))
    assert {one.rule for one in down if isinstance(one, TopDown)} >= {*node_rules_for(drafter)}
    assert not any(isinstance(one, BottomUp) for one in down) and not any(isinstance(one, TopDown) for one in up)
    assert {type(one) for one in down if not isinstance(one, TopDown)} == {
        type(line.usual) for line in tables.RULES if line.lossless and not line.decides_at_nodes
    }
    assert [one.scheme for one in tree_rules_for(drafter, ["block"])] == [IID()]
    assert [one.scheme for one in tree_rules_for(drafter, ["block"], [WithoutReplacement()])] == [WithoutReplacement()]
    assert TopDown(NaiveMatch(Coupled())) in down and BottomUp(NaiveMatch(IID())) in up


def test_acceptance_is_that_of_the_rows_and_no_lossless_rule_is_above_the_optimum(
    models: Models, rows: list[Rows]
) -> None:
    heard = Heard()
    rules = node_rules_for(as_drafter(models.pair.draft), ["speculative", "naive", "optimal"])
    found = list(measure_laws(rules, rows, SMALL, hear(heard)))
    assert heard[-1] == ("laws", len(found), len(found)) and len({(one.rule, one.scheme) for one in found}) > 10
    for one in found:
        assert one.acceptance is not None and one.acceptance <= one.optimum + 1e-9
        assert 0 < one.node_ms <= one.slowest_ms and one.batch_ms > 0
        assert (one.positions, one.nodes) == (10, 3)
        if one.rule == "optimal":
            assert one.acceptance == pytest.approx(one.optimum, abs=1e-7)
    alone = {one.temperature: one for one in found if one.rule == "speculative sampling"}
    assert len([one for one in found if one.rule == "speculative sampling"]) == 2, "it takes one draft, so k = 3 is 1"
    for each in rows:
        expected = float(overlap(each.target.double(), each.draft.double()).mean())
        assert alone[each.temperature].acceptance == pytest.approx(expected, abs=1e-6)
    assert {one.drafts for one in found if one.scheme == "spechub"} == {1, 2}


def test_product_drafts_have_a_second_row_at_half_the_temperature() -> None:
    draft = torch.tensor([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    assert rows_for(IID(), draft) is draft
    both = rows_for(Product(), draft)
    assert both[:, 0].equal(draft)
    torch.testing.assert_close(both[:, 1], torch.tensor([[0.36 / 0.52, 0.16 / 0.52, 0.0], [0.5, 0.5, 0.0]]).double())


def test_the_same_seed_gives_the_same_rows(models: Models, ids: list[torch.Tensor], rows: list[Rows]) -> None:
    again = rows_of_texts(models, ids, 0.8, SMALL)
    assert again.target.equal(rows[1].target) and again.draft.equal(rows[1].draft)
    assert again.spread(3).draft.equal(again.draft[[0, 4, 9]])


def test_shares_are_of_steps_with_trees_cut_to_what_a_rule_takes(models: Models, ids: list[torch.Tensor]) -> None:
    chosen: list[TreeVerifier] = tree_rules_for(as_drafter(models.pair.draft), ["speculative", "spec-hub"])
    heard = Heard()
    found = list(measure_shares(chosen, models.pair, ids[:1], SMALL, hear(heard)))
    assert len(found) == len(chosen) * 4 == len(heard)
    for one in found:
        assert 0 < one.verify_ms < one.step_ms and one.share == pytest.approx(one.verify_ms / one.step_ms)
        assert 1 <= one.block_efficiency <= 1 + len(one.nodes) and one.steps >= 2
    nodes = {(one.rule, one.temperature, one.tree): one.nodes for one in found}
    assert nodes["spechub", 0.8, "2,1"] == (2, 2) and nodes["speculative sampling", 0.8, "2,1"] == (1, 1)
    assert nodes["speculative sampling", 0.0, "default"] == (1, 1, 1, 1, 1, 1)
    assert nodes["spechub", 0.0, "default"] == (2, 3, 3, 2, 2, 1)


def test_a_shape_is_narrowed_to_the_first_children() -> None:
    shape = TreeShape(((3,), (2, 1, 3), (0, 0, 1, 2)))
    assert narrowed(shape, 3).parents == shape.parents
    assert narrowed(shape, 2).parents == TreeShape(((2,), (2, 1), (0, 0, 1))).parents
    assert narrowed(shape, 1).parents == TreeShape(((1,), (1,))).parents
    drafter = as_drafter(tiny_model())
    assert tree_for(TopDown(NaiveMatch()), "3,2", drafter, 1.0) == Widths((3, 2))
    assert tree_for(TopDown(SpeculativeSampling()), "best-first:8x4", drafter, 1.0) == Chain(4)
    assert tree_for(TopDown(NaiveMatch()), "best-first:8x4", drafter, 1.0) == BestFirst(8, 4)


def test_the_optimum_is_timed_over_a_vocabulary_and_at_a_batch() -> None:
    found = list(measure_optima([IID(), WithoutReplacement(), SpecHub(), Product()], SMALL))
    assert {(one.rows, one.tokens) for one in found} == {(1, 40), (3, 9)}
    assert all(0 < one.fastest <= one.milliseconds <= one.slowest for one in found)
    assert {(one.scheme, one.drafts) for one in found if one.quadrature} == {("without replacement", 3)}
    assert all(0 <= one.error < 1e-12 for one in found if one.error is not None)
    assert {one.rows for one in found if one.scheme == "product"} == {3}
    assert {one.drafts for one in found if one.scheme == "spechub"} == {1, 2}


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), one_thread():
        assert torch.get_num_threads() == 1
        _ = 1 / 0
    assert torch.get_num_threads() == before


def test_models_that_do_not_pay_are_made_of_copies() -> None:
    model, tokens = tiny_model(), torch.tensor([[1, 2, 3]])
    before = model(tokens).logits
    (stream,) = Noise.from_seed(0, 1).generators
    mixed, noised = shuffled(model, stream), noisy(model, stream)
    assert model(tokens).logits.equal(before)
    assert not mixed(tokens).logits.allclose(before) and not noised(tokens).logits.allclose(before)
    for name, weight in model.named_parameters():
        twin = mixed.get_parameter(name)
        assert twin.flatten().sort().values.equal(weight.flatten().sort().values)
    weights = [torch.cat([one.detach().flatten() for one in kind.parameters()]) for kind in (model, noised)]
    assert 0 < float((weights[1] - weights[0]).std()) < float(weights[0].std())


class Turn(planning.Lane):
    """A lane that notes when it takes a step, and writes a fixed number of tokens by each."""

    def __init__(self, name: str, by_step: int, order: list[str]) -> None:
        self.name, self.by_step, self.order = name, by_step, order
        self.count, self.seconds, self.over = 0, 2.0, False

    @property
    def written(self) -> int:
        return self.count

    def step(self) -> None:
        self.order.append(self.name)
        self.count += self.by_step
        self.over = self.count >= 4


def test_whoever_has_written_least_takes_the_next_step() -> None:
    order = list[str]()
    speeds = side_by_side([Turn("slow", 1, order), Turn("fast", 3, order)])
    assert order == ["slow", "fast", "slow", "slow", "slow", "fast"]
    assert speeds == [2.0, 3.0]


def test_arms_are_compared_text_by_text_with_plain_decoding_and_the_fastest_tree() -> None:
    found = compared("s", {PLAIN: [10.0, 20.0], PLANNER: [20.0, 30.0], "tree 1": [40.0, 40.0], "tree 2": [90.0, 15.0]})
    by_arm = {one.arm: one for one in found}
    assert by_arm[PLANNER].against_plain == (2.0, 1.5) and by_arm[PLANNER].against_best == (0.5, 0.75)
    assert by_arm[PLANNER].tokens_per_second == pytest.approx(24.0)
    assert {one.against_best for one in compared("s", {PLAIN: [1.0], PLANNER: [2.0]})} == {()}


@pytest.mark.usefixtures("quick")
def test_the_planner_writes_beside_plain_decoding_and_trees(models: Models, ids: list[torch.Tensor]) -> None:
    heard, options = Heard(), PlannerOptions(3, 1)
    alone, good = settings_named(["useless draft, temperature 1", "good pair, temperature 1"])
    plain, planner = measure_planner(models.pair, ids, alone, options, hear(heard))
    assert (plain.arm, planner.arm) == (PLAIN, PLANNER) and plain.against_plain == (1.0, 1.0)
    assert len(planner.against_plain) == 2 and planner.against_best == () and planner.tokens_per_second > 0
    assert heard == [(alone.name, 1, 2), (alone.name, 2, 2)]
    arms = [one.arm for one in measure_planner(models.pair, ids, good, options)]
    trees = [f"tree {'+'.join('1' * length)}" for length in (5, 7, 2, 1, 10)]
    assert arms == [PLAIN, PLANNER, *trees, "lookup, else tree 1+1+1+1+1", "lookup alone"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("fresh", "made"), [(False, 1), (True, 5)])
def test_a_fresh_planner_is_made_for_every_text(
    fresh: bool, made: int, models: Models, ids: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    planners = list[planning.Planner]()

    class Counted(planning.Planner):
        def __init__(self) -> None:
            super().__init__()
            planners.append(self)

    monkeypatch.setattr(planning, "Planner", Counted)
    setting = PlannerSetting("mine", lambda pair: pair.draft, 0.0)
    measure_planner(models.pair, ids, setting, PlannerOptions(2, repeats=2, fresh=fresh))
    assert len(planners) == made


@pytest.mark.usefixtures("quick")
def test_a_batch_has_so_many_rows_and_settings_are_chosen_by_parts_of_names(
    models: Models, ids: list[torch.Tensor]
) -> None:
    (batch,) = settings_named(["batch"])
    assert [len(one.input_ids) for one in planning.batches(ids, batch.batch_size)] == [16]
    assert planning.rounds_of(batch, 2, PlannerOptions(repeats=3)) == 24
    found = measure_planner(models.pair, ids, batch, PlannerOptions(1, 1))
    assert {len(one.against_plain) for one in found} == {8}
    assert settings_named([]) == list(planning.SETTINGS) and len(settings_named(["useless", "1.5"])) == 3
    for wrong in ("warp", "", " "):
        with pytest.raises(InvalidParameter, match="There is no setting with"):
            settings_named([wrong])


PAGE = Path(__file__).parents[2] / "docs" / "acceptance.md"


def said_on_the_page(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Return what the table says: scheme, rule or "optimum", and the per cents for two and for four drafts."""
    scheme = ""
    for line in re.findall(r"^\| .*%.*\|$", text, re.MULTILINE):
        drawn, best, rules, accepted = (cell.strip() for cell in line.strip("|").split("|"))
        scheme = re.sub(r"\W.*", "", drawn.strip("`")) or scheme
        for name, cell in (("optimum", best), *((rule, accepted) for rule in re.findall(r"`(\w+)`", rules))):
            yield scheme, name, re.findall(r"\d+\.\d", cell)


@pytest.mark.slow
def test_the_page_on_acceptance_says_what_the_command_computes() -> None:
    """`polydraft bench rules --part laws --limit 8`, without its times; the page was rounded from four digits."""
    pair, settings = load_pair(), RulesSettings()
    prompts = [encode(pair, one) for one in read_prompt_sets(["python"], 8)]
    rows = rows_of_texts(Models.of(pair), prompts, 1.0, settings)
    page, alone = PAGE.read_text(), acceptance(SpeculativeSampling(), rows, 1)
    assert alone is not None and f"accepted in {100 * alone:.1f} %" in page
    assert re.search(rf"at {len(rows.draft)}\s+positions", page)
    rules = {(type(one.scheme).__name__, type(one).__name__): one for one in node_rules_for(as_drafter(pair.draft))}
    schemes = {scheme: rule.scheme for (scheme, _), rule in rules.items()}
    checked = 0
    for scheme, name, numbers in said_on_the_page(page):
        for k, number in zip(settings.drafts, numbers, strict=False):
            value = optimum(schemes[scheme], rows, k) if name == "optimum" else acceptance(rules[scheme, name], rows, k)
            assert value is not None and abs(100 * value - float(number)) < 0.056, (scheme, name, k)
            checked += 1
    assert checked > 40
