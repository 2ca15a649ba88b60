"""`polydraft align` makes a draft, judges it, goes on where it was, and refuses what cannot be done in one sentence."""

import errno
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from align_machine import LOSES, PAYS, PROMPTS, prepared
from doubles import tiny_model
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PhiConfig, PhiForCausalLM

import polydraft
from polydraft.bench.aligning import AlignmentVerdict, AlignPlan, alignable, aligned_draft, kept_best, run_alignment
from polydraft.bench.aligning import align_stages as stages
from polydraft.bench.aligning import distilling as runs
from polydraft.bench.aligning.alignable import wanted_forms
from polydraft.bench.aligning.draft_card import CurvePoint, best_of, curve_lines
from polydraft.bench.aligning.form_costs import FormCost
from polydraft.bench.speed import arms
from polydraft.cli import main
from polydraft.cli.benchmark import align_making
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.models import HuggingFaceModel, Pair
from polydraft.models.checkpoints.weight_versions import disk_errors
from polydraft.probs import SamplingParams
from polydraft.training.alignment.draft_forms import GIVEN, UNASKED, Material
from polydraft.training.alignment.model_weights import read_weights
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.shards import Shards

Call = Callable[..., int]
LAYERS = {"llama": "num_hidden_layers", "gpt2": "n_layer", "falcon": "num_hidden_layers"}
OTHER_LAYERS = {"width": "its layers are not of Llama's kind", "spire": "they are not of Llama's or Qwen's kind"}
CANNOT = {"llama": {}, "gpt2": OTHER_LAYERS, "falcon": OTHER_LAYERS}
"""Which forms a kind of target cannot have, and why."""


def ticking() -> Callable[[], float]:
    """Return a clock by which every look takes a tenth of a second, and nothing else any time."""
    count = itertools.count()
    return lambda: 0.1 * next(count)


@pytest.fixture
def here(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stages, "PASSES", 1)
    return prepared(folders, tmp_path, monkeypatch)


def plan(**changes: Any) -> AlignPlan:
    return AlignPlan(
        **{"out": Path("made"), "minutes": 0.2, "max_new_tokens": 8, "losses": ("jsd", "lk-alpha"), **changes}
    )


def check_drafts(folder: Path, target: str = "target") -> None:
    """Check that a folder loads as a draft that drafts, and that greedy text stays."""
    pair = polydraft.load(target, folder)
    prompt = pair.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    drafted, plain = (
        polydraft.stream(pair.target, prompt, drafter=one, do_sample=False, max_new_tokens=12).exhaust()
        for one in (pair.draft, "none")
    )
    assert drafted.new_tokens == plain.new_tokens
    assert drafted.statistics.drafted > 0 == plain.statistics.drafted


def test_a_draft_is_tuned_judged_and_loads(here: Path) -> None:
    said = list[str]()
    found = run_alignment("target", "draft", PROMPTS, plan(), say=said.append, clock=ticking())
    assert (found.form, found.folder) == ("tuned", Path("made")) and found.loss in ("jsd", "lk-alpha")
    assert [line[:12] for line in said if line.startswith("Stage")] == [
        f"Stage {number} of 5" for number in range(1, 6)
    ]
    assert found.curve[0].step == 0 and max(one.score for one in found.curve) > found.curve[0].score
    assert {one.temperature for one in found.verdict.judged} == {0.0, 1.0}
    for one in found.verdict.judged:
        assert {*one.over_plain} >= {"given draft", "drafts from text", "after"} and one.before != "after"
    card = Path("made/README.md").read_text()
    assert f"**{found.verdict.word}**" in card and "kept" in card and Path("made/curve.svg").is_file()
    check_drafts(Path("made"))
    given, made = (load_file(Path(one) / "model.safetensors") for one in ("draft", "made"))
    assert any(not torch.equal(given[name].bfloat16(), made[name]) for name in made)
    with pytest.raises(InvalidParameter, match="--out made is not empty"):
        plan()
    json.dumps(found.as_dict())


def test_filters_have_no_temperature_of_their_own(here: Path) -> None:
    with pytest.raises(
        InvalidParameter, match=r"The filters have a temperature of 0\.5; name it among the temperatures"
    ):
        plan(filters=SamplingParams(temperature=0.5, top_p=0.9))


def test_heads_learn_under_the_filters_that_are_served(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, own, served = list[SamplingParams](), TargetEnds.laws, SamplingParams(top_k=2)
    monkeypatch.setattr(TargetEnds, "laws", lambda ends, *given: (found.append(ends.filters), own(ends, *given))[1])
    chosen = plan(temperatures=(1.0,), filters=served, forms=("medusa",), losses=("entropy",))
    run_alignment("target", None, PROMPTS, chosen, clock=ticking())
    assert found and all(one == served for one in found)


def test_filters_that_are_served_hold_in_every_stage(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[dict[str, Any]]()
    own = arms.stream
    monkeypatch.setattr(arms, "stream", lambda *given, **named: (asked.append(named), own(*given, **named))[1])
    chosen = plan(temperatures=(1.0,), filters=SamplingParams(top_k=2))
    found = run_alignment("target", "draft", PROMPTS, chosen, clock=ticking())
    assert asked and all(one["top_k"] == 2 and one["temperature"] == 1 for one in asked)
    assert "* top_k: 2" in Path("made/README.md").read_text()
    model = polydraft.load("target").target
    for row in Shards([*Path("made-work/text").glob("*.safetensors")]):
        places = row["valid"].nonzero().flatten()
        likeliest = model(row["ids"][None]).logits[0, places - 1].topk(2).indices
        assert bool((likeliest == row["ids"][places].unsqueeze(-1)).any(-1).all())
    assert found.curve and all({*one.calls} == {"1"} for one in found.curve)
    with pytest.raises(ResultsError, match="another filters"):
        run_alignment("target", "draft", PROMPTS, plan(out=Path("new"), work=Path("made-work"), temperatures=(1.0,)))


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [PROMPTS, None])
def test_a_target_alone_comes_to_a_verdict(here: Path, prompts: list[str] | None) -> None:
    """Of the forms that can pay those are tried that there is time for; without prompts the target begins its texts."""
    found = run_alignment("target", None, prompts, plan(losses=(), temperatures=(1.0,)), clock=ticking())
    tried = json.loads((here / "made-work" / "trials.json").read_text())
    assert {*found.costs} == {"layers", "small", "mixing"} >= {one["form"] for one in tried}
    assert found.form == max(tried, key=lambda one: one["value"])["form"] and found.folder == Path("made")
    (judged,) = found.verdict.judged
    assert {*judged.over_plain} >= {"drafts from text", "after"} and "given draft" not in judged.over_plain
    assert f"**{found.verdict.word}**" in Path("made/README.md").read_text()
    check_drafts(Path("made"))


@pytest.mark.slow
def test_the_public_call_does_the_same_and_takes_words_for_settings(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned_draft, "run_alignment", partial(run_alignment, clock=ticking()))
    said = list[str]()
    found = polydraft.align(
        *("target", "draft"),
        out="made",
        work="kept",
        prompts=PROMPTS,
        minutes=0.2,
        losses=["jsd"],
        max_new_tokens=8,
        temperatures=(1.0,),
        say=said.append,
    )
    assert (found.form, found.loss, found.folder) == ("tuned", "jsd", Path("made")) and said
    assert [one.temperature for one in found.verdict.judged] == [1.0] and kept_best(Path("kept"))[0] is not None
    check_drafts(Path("made"))


@pytest.mark.slow
def test_a_target_of_eight_bits_needs_no_gradients(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[torch.nn.Module]()

    def rounded(*given: Any, **named: Any) -> Pair:
        pair = load(*given, **{**named, "weights": "int8"})
        seen.append(pair.target)
        return pair

    load = alignable.load
    monkeypatch.setattr(alignable, "load", rounded)
    found = run_alignment("target", "draft", PROMPTS, plan(losses=("jsd",), temperatures=(1.0,)), clock=ticking())
    assert found.folder == Path("made") and max(one.score for one in found.curve) > found.curve[0].score
    (target,) = seen
    assert any(type(one).__name__ == "Int8Linear" for one in target.modules())
    assert all(one.grad is None for one in target.parameters())
    check_drafts(Path("made"))


@pytest.mark.slow
def test_a_gguf_file_of_eight_bits_gets_a_draft(here: Path) -> None:
    write_gguf(here / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    found = run_alignment("model.gguf", None, PROMPTS, plan(losses=(), forms=("layers",)), clock=ticking())
    assert found.folder == Path("made") and found.curve
    check_drafts(Path("made"), "model.gguf")


KILLED = """
import sys
from pathlib import Path
from align_machine import PAYS, PROMPTS
from test_align_making import plan, ticking
from polydraft.bench.aligning import align_stages as stages, run_alignment
stages.PASSES, stages.ROWS, stages.cost_of = 1, (4, 8), lambda *_: PAYS
run_alignment("target", "draft", PROMPTS, plan(minutes=0.5, losses=("jsd",)), clock=ticking())
"""


@pytest.mark.slow
def test_what_is_killed_goes_on_from_its_last_checkpoint(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGKILL, as soon as the second checkpoint of the run is whole; then the same call in this process.

    The next checkpoint is as one that was killed in the middle of being written.
    """
    run = here / "made-work" / "main"
    places = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", KILLED], env=places) as other:
        while other.poll() is None and len([*run.glob("checkpoint-*/trainer_state.json")]) < 2:
            time.sleep(0.02)
        assert other.poll() is None, "it ended before it could be killed"
        other.kill()
    last = max(int(one.parent.name.rpartition("-")[2]) for one in run.glob("checkpoint-*/trainer_state.json"))
    half = run / f"checkpoint-{last + 1}"
    half.mkdir(exist_ok=True)
    (half / "trainer_state.json").write_text('{"epoch": 1.')
    curve, best = json.loads((here / "made-work" / "curve.json").read_text()), kept_best(here / "made-work")[0]
    assert best is not None and polydraft.load("target", best).draft is not None and not Path("made").exists()
    steps, own = list[int](), runs.run_steps

    def noted(training: Any, texts: Any, folder: Path, recipe: Any, after: Any, *others: Any) -> None:
        own(training, texts, folder, recipe, lambda step, log: (steps.append(step), after(step, log))[1], *others)

    monkeypatch.setattr(runs, "run_steps", noted)
    found = run_alignment("target", "draft", PROMPTS, plan(minutes=0.5, losses=("jsd",)), clock=ticking())
    assert steps[0] == last + 1 > 2, "what a checkpoint has is not taken again"
    assert found.folder == Path("made") and [one.as_dict() for one in found.curve[: len(curve) - 1]] == curve[:-1]
    check_drafts(Path("made"))


@pytest.mark.parametrize(
    "place", ["distilled", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tried", "compare"))]
)
def test_the_same_call_goes_on_behind_an_interruption(here: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stages, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_alignment("target", "draft", PROMPTS, plan(), clock=ticking())
    work = here / "made-work"
    kept = {one: one.stat().st_mtime_ns for one in work.rglob("*") if one.suffix == ".safetensors" and one.is_file()}
    assert kept and (kept_best(work)[0] is None) == (place == "tried") and not Path("made").exists()
    spent = json.loads((work / "spent.json").read_text())
    found = run_alignment("target", "draft", PROMPTS, plan(minutes=0.4), clock=ticking())
    assert found.folder == Path("made") and found.minutes * 60 > spent
    texts = [one for one in kept if one.parent.name == "text"]
    assert texts and all(one.stat().st_mtime_ns == kept[one] for one in texts)


@pytest.mark.slow
def test_ctrl_c_leaves_the_best_so_far_and_the_run_goes_on_from_its_checkpoint(here: Path) -> None:
    asked = itertools.count()

    @contextmanager
    def noting() -> Iterator[Callable[[], bool]]:
        yield lambda: (here / "made-work" / "main").is_dir() and next(asked) > 0

    with pytest.raises(KeyboardInterrupt):
        run_alignment("target", "draft", PROMPTS, plan(minutes=0.4), clock=ticking(), noting=noting)
    work = here / "made-work"
    best, _ = kept_best(work)
    assert best is not None and polydraft.load("target", best).draft is not None
    assert [*(work / "main").glob("checkpoint-*")]
    before = json.loads((work / "curve.json").read_text())
    found = run_alignment("target", "draft", PROMPTS, plan(minutes=0.8), clock=ticking())
    assert len(found.curve) > len(before) and [one.as_dict() for one in found.curve[:2]] == before[:2]


def test_what_is_worse_is_never_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target cannot be beaten as its own draft, and a rate of nearly one destroys it: what was given stays."""
    form = replace(stages.draft_form("tuned"), rate=0.9, losses=("tvd",))
    for place in (stages, alignable):
        monkeypatch.setattr(place, "draft_form", lambda _: form)
    found = run_alignment("target", "target", PROMPTS, plan(losses=("tvd",), forms=("tuned",)), clock=ticking())
    assert not found.verdict.better and "No step of training was worth more" in found.verdict.reason
    assert len(found.curve) > 1 and best_of(found.curve).step == 0
    given, made = (load_file(Path(one) / "model.safetensors")["lm_head.weight"] for one in ("target", "made"))
    assert torch.equal(given.bfloat16(), made)


def test_a_given_draft_is_measured_before_its_first_trial_whatever_is_tried_before(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "distilled", interrupt)
    monkeypatch.setattr(stages, "cost_of", lambda *_: PAYS)
    with pytest.raises(KeyboardInterrupt):
        run_alignment(
            "target", "draft", PROMPTS, plan(minutes=1, losses=(), forms=("layers", "tuned")), clock=ticking()
        )
    trials, curve = (json.loads(Path(f"made-work/{name}.json").read_text()) for name in ("trials", "curve"))
    assert [one["form"] for one in trials] == ["layers", "tuned"] and [one["step"] for one in curve] == [0]


def test_a_drafter_that_cannot_be_tuned_is_not(here: Path) -> None:
    for draft in (None, polydraft.NgramDrafter()):
        first = [form.word for form in wanted_forms(plan(losses=()), draft, "ngram")]
        assert first[:5] == ["layers", "small", "mixing", "width", "vocabulary"] and not {"tuned", "lora"} & {*first}
    target = polydraft.load("target").target
    head = stages.seeded(
        stages.draft_form("medusa"), Material(HuggingFaceModel(target), TargetEnds.of(target)), "published", 0
    )
    with torch.no_grad():
        next(head.training.parameters()).fill_(math.nan)
    with pytest.raises(InvalidParameter, match="The draft's weights are no numbers"):
        wanted_forms(plan(losses=()), head.drafter, "head")
    with pytest.raises(InvalidParameter, match="--draft ngram is no draft model of its own, and these alone are tuned"):
        wanted_forms(plan(losses=(), forms=("layers", "lora")), polydraft.NgramDrafter(), "ngram")
    named = wanted_forms(plan(losses=(), forms=("small", "layers", "small")), None, "none")
    assert [form.word for form in named] == ["small", "layers"]
    assert [form.word for form in wanted_forms(plan(losses=(), forms=("auto",)), None, "none")] == first


@pytest.mark.parametrize("draft", ["head", "self:int8", "draft < ngram"])
def test_new_drafts_are_compared_with_a_given_one_that_cannot_be_tuned(
    here: Path, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    if draft == "head":
        target = HuggingFaceModel(polydraft.load("target").target)
        made = stages.seeded(stages.draft_form("medusa"), Material(target, TargetEnds.of(target.model)), "published", 0)
        made.write(here / "head", target, "official", "")
    found = run_alignment("target", draft, PROMPTS, plan(losses=(), temperatures=(1.0,)), clock=ticking())
    assert found.form == "layers"
    for one in found.verdict.judged:
        assert {*one.over_plain} >= {"given draft", "after"}
    assert f"begun with {draft}" not in Path("made/README.md").read_text()


def arms_of(
    minutes: float,
    draft: str | None,
    monkeypatch: pytest.MonkeyPatch,
    say: Callable[[str], None] = lambda _: None,
    **changes: Any,
) -> list[tuple[str, str]]:
    """Return what an alignment would try."""

    def interrupt(_: Any, arms: list[Any]) -> None:
        tried.extend((form.word, loss) for form, loss in arms)
        raise KeyboardInterrupt

    tried = list[tuple[str, str]]()
    with monkeypatch.context() as patched:
        patched.setattr(stages, "tried", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_alignment("target", draft, PROMPTS, plan(minutes=minutes, **changes), clock=ticking(), say=say)
    return tried


def test_all_forms_that_can_pay_are_tried_as_far_as_there_is_time_the_given_draft_first(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "TRIAL", 0.5)
    costs = {"tuned": PAYS, "lora": PAYS, "pard-path": LOSES, "boost:2": PAYS, "layers": LOSES}
    monkeypatch.setattr(stages.AlignStages, "_untrained", lambda _, form: form.word)
    monkeypatch.setattr(stages, "owned_models", lambda _: [])
    monkeypatch.setattr(stages, "owned_networks", lambda _: [])
    monkeypatch.setattr(stages, "cost_of", lambda _, word, __: costs.get(word, PAYS))
    tuned = [("tuned", one) for one in ("jsd", "lk-alpha", "calls")]
    own, said = {"losses": (), "work": Path("given")}, list[str]()
    assert arms_of(0.2, "draft", monkeypatch, said.append, **own) == tuned
    (line,) = [one for one in said if one.endswith(" are not tried.")]
    assert line.startswith("Their trials fill the time: lora, pard-path, boost:2, layers, small, ")
    assert json.loads(Path("given/costs.json").read_text()).keys() == {"tuned"}
    more = [*tuned, ("lora", "jsd"), ("boost:2", "fkl"), ("small", "fkl+lk-alpha")]
    assert arms_of(0.36, "draft", monkeypatch, losses=(), work=Path("more")) == more
    few = arms_of(0.36, None, monkeypatch, losses=(), work=Path("none"))
    assert [word for word, _ in few] == ["small", "mixing", "width", "vocabulary", "medusa", "mlp"]
    every = arms_of(8, None, monkeypatch, losses=(), work=Path("all"))
    assert {word for word, _ in every} == {*UNASKED} - {"layers", "pard-path"}
    assert ("small", "jsd") in every[len(UNASKED) - 2 :]  # other losses behind all forms


def test_forms_with_more_weights_than_their_target_are_left_out_where_these_are_many(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "cost_of", lambda *_: LOSES)
    monkeypatch.setattr(stages, "LARGE", 1000)
    said, most = list[str](), sum(one.numel() for one in polydraft.load("target").target.parameters())
    found = run_alignment("target", None, PROMPTS, plan(losses=()), clock=ticking(), say=said.append)
    left = {one.partition(":")[0] for one in said if one.endswith("million weights, more than the target.")}
    sizes = json.loads((here / "made-work" / "sizes.json").read_text())
    assert found.costs and left and not left & {*found.costs} and 1000 < max(sizes.values()) <= most
    alone = run_alignment(
        "target", None, PROMPTS, plan(losses=(), forms=(min(left),), out=Path("one")), clock=ticking()
    )
    assert alone.costs and {*alone.costs} == {min(left)}, "what is named is looked at whatever its size"


def test_what_there_was_no_time_to_look_at_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "cost_of", lambda *_: LOSES)
    monkeypatch.setattr(stages, "HALF", 0.05)
    said = list[str]()
    found = run_alignment("target", None, PROMPTS, plan(losses=()), clock=ticking(), say=said.append)
    (line,) = [one for one in said if one.startswith("There is no time to look at ")]
    assert found.costs and not {*found.costs} & {*line.removeprefix("There is no time to look at ")[:-1].split(", ")}
    assert {*found.costs} | {*line.removeprefix("There is no time to look at ")[:-1].split(", ")} == {*UNASKED}


@pytest.fixture
def call(here: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["polydraft", "align", "target", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0)

    return run


def test_what_cannot_pay_is_refused_with_its_reason_and_a_code_of_its_own(
    call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "cost_of", lambda *_: LOSES)
    assert call("--prompts", "rows.jsonl", "--minutes", "5", "--json") == 3
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] is None and not Path("aligned").exists()
    closest = (
        f"No form of draft can pay on this machine. Of {len(told['costs'])} forms that were looked at layers comes "
    )
    assert told["verdict"]["reason"].startswith(closest) and "eagle-3" in told["costs"]
    assert all(one in UNASKED for one in told["costs"])


BAD = [
    (("--prompts", "empty.jsonl"), "the file has no prompt in it"),
    (("--prompts", "one.jsonl"), "needs 3 different prompts or more"),
    (("--prompts", "long.jsonl"), "3 different prompts or more"),
    (("--minutes", "0.1"), "--minutes must be at least 0.2, but is 0.1"),
    (("--top-p", "0.9", "--temperature", "0"), "top_p would do nothing at temperature 0"),
    (("--top-p", "1.5"), "top"),
    (("--form", "boost"), "Boosted drafts are boost:N or boost:N:samples, N from 2 to 8, not 'boost'"),
    (("--form", "boost:9"), "N from 2 to 8, not 'boost:9'"),
    (("--form", "boost:2", "--loss", "calls"), "form boost:2 learns by"),
    (("--form", "smal"), "did you mean small"),
    (("--form", "spec-drafter"), "The form spec-drafter is for encoder-decoders"),
    (("--form", "medusa-2"), "The form medusa-2 has the target learn with it"),
    (("--form", "tuned"), "There is no draft model for --form tuned"),
    (("--form", "small", "--form", "tuned"), "There is no draft model for --form tuned"),
    (("--form", "auto", "--form", "small"), "--form auto is all forms that can pay"),
    (("--form", "lora"), "There is no draft model for --form lora"),
    (("--form", "mixing", "--loss", "tvd"), "form mixing learns by"),
    (("--draft", "draft", "--loss", "jsb"), "not 'jsb'"),
    (("--draft", "self:int8", "--form", "tuned"), "--draft self:int8 is no draft model of its own"),
    (("--draft", "draft < ngram", "--form", "lora"), "is no draft model of its own"),
    (("--draft", "missing"), "missing"),
    (("--most-bytes", "0"), "most-bytes"),
    (("--out", "rows.jsonl/x"), "rows.jsonl/x cannot be written"),
    (
        ("--draft", "foreign"),
        "tokens differ; take a draft model of the same family; or leave --draft out: --form small",
    ),
    (("--out", "full"), "--out full is not empty"),
    (("--out", "x", "--work", "x"), "the same folder"),
    (("--work", "full"), "holds something else than an alignment"),
    (("--length", "3"), "--length is for --measure"),
    (("--chat-template",), "--chat-template is for --prompts"),
    (("--temperature", "1", "--temperature", "1"), "temperatures must be different"),
    (("--max-new-tokens", "200", "--prompts", "rows.jsonl"), "--max-new-tokens 200 leaves no room"),
    (("--measure", "--draft", "draft", "--minutes", "3", "--loss", "fkl"), "--minutes and --loss would do nothing"),
]


LATE = [
    (("--draft", "damaged"), "The draft's weights are no numbers"),
    (("--prompts", "rows.jsonl", "--most-bytes", "20000"), "--most-bytes 20000 are too few"),
]
"""What weights tell; all else is said before they are read."""


@pytest.mark.parametrize(
    ("arguments", "told", "reads"), [*((*one, False) for one in BAD), *((*one, True) for one in LATE)]
)
def test_bad_calls_are_refused_in_one_sentence_before_any_long_work(
    call: Call,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    told: str,
    reads: bool,
) -> None:
    read = list[str]()
    own = alignable.load
    monkeypatch.setattr(alignable, "load", lambda *given, **named: (read.append("weights"), own(*given, **named))[1])
    (here / "empty.jsonl").write_text("")
    (here / "one.jsonl").write_text('{"prompt": "def"}\n')
    (here / "long.jsonl").write_text("\n".join(json.dumps({"prompt": f"{one} = 1\n" * 90}) for one in "abcd"))
    (here / "full").mkdir()
    (here / "full" / "x").write_text("")
    for name in ("foreign", "damaged"):
        (here / name).mkdir()
        for one in (here / "draft").resolve().iterdir():
            (here / name / one.name).write_bytes(one.read_bytes())
    vocabulary = here / "foreign" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"A":', '"\\u0100\\u0101":'))
    weights = load_file(here / "damaged" / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, here / "damaged" / "model.safetensors", {"format": "pt"})
    assert call(*arguments) == 2
    said = capsys.readouterr().err
    assert told in said and said.splitlines()[-1].startswith("polydraft: ")
    assert sum(line.startswith("polydraft: ") for line in said.splitlines()) == 1
    assert bool(read) == reads
    assert not (here / "aligned-work" / "text").exists()


def test_targets_that_drafts_cannot_be_aligned_for_are_refused_by_name(here: Path, folders: tuple[Path, Path]) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    biased = PhiForCausalLM(PhiConfig(vocab_size=320, bos_token_id=0, eos_token_id=0, pad_token_id=0, **sizes))
    for name, made in (("coder", tiny_model("t5", 320)), ("biased", biased)):
        made.save_pretrained(str(here / name))
        for one in folders[0].glob("*token*"):
            (here / name / one.name).write_bytes(one.read_bytes())
    with pytest.raises(InvalidParameter, match="coder has an encoder, and drafts are aligned for decoders"):
        run_alignment("coder", None, PROMPTS, plan(), clock=ticking())
    with pytest.raises(polydraft.PolydraftError, match="ends are no tables"):
        run_alignment("biased", None, PROMPTS, plan(losses=()), clock=ticking())
    assert not (here / "made-work").exists()


def test_a_target_of_no_numbers_is_refused(here: Path, folders: tuple[Path, Path]) -> None:
    (here / "nan").mkdir()
    for one in folders[0].iterdir():
        (here / "nan" / one.name).write_bytes(one.read_bytes())
    weights = load_file(here / "nan" / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, here / "nan" / "model.safetensors", {"format": "pt"})
    with pytest.raises(polydraft.PolydraftError, match=r"no numbers|finite|NaN"):
        run_alignment("nan", None, PROMPTS, plan(), clock=ticking())


@pytest.mark.parametrize(
    "form",
    ["lora", *(pytest.param(one, marks=pytest.mark.slow) for one in ("vocabulary", "boost:2", "width", "pard-path"))],
)
def test_other_forms_are_made_judged_and_load(form: str, here: Path) -> None:
    draft = "draft" if form != "width" else None
    losses = ("adaspec",) if form == "lora" else ()
    found = run_alignment("target", draft, PROMPTS, plan(forms=(form,), losses=losses), clock=ticking())
    assert found.form == form and found.folder == Path("made")
    assert (here / "made-work" / "reference-lora.safetensors").is_file() == (form == "lora")
    check_drafts(Path("made"))
    told = "" if form in ("vocabulary", "width") else ", begun with draft"
    card = Path("made/README.md").read_text()
    assert f"{form}{told}" in card and "vocabulary, begun" not in card


def test_a_disk_that_fills_keeps_what_there_is(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs, "write_weights", full)
    assert call("--draft", "draft", "--prompts", "rows.jsonl", "--minutes", "0.2") == 2
    assert "No space left on device; what was finished is kept" in capsys.readouterr().err
    assert [*(here / "aligned-work" / "text").glob("*.safetensors")] and kept_best(here / "aligned-work")[0] is not None


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, which is what a full disk looks like to whoever writes."""
    resource = pytest.importorskip("resource", reason="no limits here")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def test_what_a_full_disk_really_raises_is_one_sentence(
    call: Call, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(4000):
        assert call("--draft", "draft", "--prompts", "rows.jsonl", "--minutes", "0.2") == 2
    assert "File too large (os error 27); what was finished is kept" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("write", [save_file, torch.save])
def test_what_writers_raise_of_a_full_disk_is_told_as_one(write: Callable[..., None], tmp_path: Path) -> None:
    with files_of_at_most(1000), pytest.raises(OSError, match=r"File too large|could not be written to its end"):
        with disk_errors():
            write({"weights": torch.zeros(10_000)}, tmp_path / "file")
    with pytest.raises(RuntimeError, match="of its own"), disk_errors():
        raise RuntimeError("an error of its own")


@pytest.mark.parametrize("better", [True, False])
def test_the_command_prints_curve_and_verdict_and_ends_with_its_code(
    better: bool, call: Call, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(align_making, "run_alignment", partial(run_alignment, clock=ticking()))
    monkeypatch.setattr(stages, "verdict_of", lambda judged, _: AlignmentVerdict(better, "For a reason.", (*judged,)))
    assert call("--draft", "draft", "--prompts", "rows.jsonl", "--minutes", "0.2", "--loss", "jsd") == 3 * (not better)
    printed = capsys.readouterr().out
    assert "step      0 #" in printed and "  best\n" in printed
    assert "Temperature 0, over plain decoding on" in printed and "Temperature 1, over" in printed
    assert ("better: For a reason." if better else "no better: For a reason.") in printed.splitlines()
    assert "The draft is in aligned, with its card and curve.svg." in printed and Path("aligned/curve.svg").is_file()


def test_ctrl_c_prints_the_curve_so_far_and_leaves_it_beside_the_best_draft(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(align_making, "run_alignment", partial(run_alignment, clock=ticking()))
    monkeypatch.setattr(stages, "compare", interrupt)
    assert call("--draft", "draft", "--prompts", "rows.jsonl", "--minutes", "0.2", "--loss", "jsd") == 130
    said = capsys.readouterr().err
    best, curve = kept_best(here / "aligned-work")
    assert best is not None and "the best draft so far is in" in " ".join(said.split())
    assert "step      0 #" in said and f"step {best_of(curve).step:>6} #" in said
    card = (best / "README.md").read_text()
    assert "An unfinished draft" in card and f"| {best_of(curve).step} |" in card and (best / "curve.svg").is_file()


def test_more_minutes_go_on_with_the_forms_that_were_begun_and_other_texts_are_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, more = (arms_of(minutes, None, monkeypatch, losses=()) for minutes in (0.2, 60.0))
    assert first == more == [("layers", "fkl+lk-alpha"), ("small", "fkl+lk-alpha"), ("mixing", "published")]
    for changed in ({"texts": 1}, {"max_new_tokens": 9}):
        with pytest.raises(ResultsError, match=f"an alignment with another {next(iter(changed))}; name an empty"):
            run_alignment("target", None, PROMPTS, plan(losses=(), **changed), clock=ticking())
    with pytest.raises(InvalidParameter, match="--most-bytes 7999999999 is less than the 8000000000 that the text in"):
        run_alignment("target", None, PROMPTS, plan(losses=(), most_bytes=7_999_999_999), clock=ticking())


def test_all_losses_that_are_named_are_tried_with_every_form_whose_cost_is_known(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter([PAYS, FormCost(), PAYS, PAYS])
    monkeypatch.setattr(stages, "cost_of", lambda *_: next(costs))
    words = ("layers", "width", "boost:2")  # small could not be timed
    assert arms_of(0.2, None, monkeypatch) == [(word, loss) for loss in ("jsd", "lk-alpha") for word in words]


@pytest.mark.parametrize("left", [2, 20])
def test_a_trial_that_was_interrupted_goes_on_to_its_planned_end(
    left: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noted(runs._Last):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            lasts.append(self)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    @contextmanager
    def noting() -> Iterator[Callable[[], bool]]:
        yield lambda: len(lasts[-1].taken) >= lasts[-1].steps - left

    lasts, asked = list[runs._Last](), plan(minutes=0.3, losses=("jsd",), forms=("tuned",))
    monkeypatch.setattr(runs, "_Last", Noted)
    monkeypatch.setattr(stages, "distilled", end)
    for given in ({"noting": noting}, {}):
        with pytest.raises(KeyboardInterrupt):
            run_alignment("target", "draft", PROMPTS, asked, clock=ticking(), **given)
    first, second = lasts
    assert first.steps == second.steps > left and first.taken[-1] < first.steps
    assert not second.taken or second.taken[0] == first.taken[-1] + 1
    assert json.loads((here / "made-work" / "trials.json").read_text())[0]["point"]["step"] <= first.steps


def test_a_trial_that_was_killed_goes_on_from_its_last_checkpoint(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    class Noted(runs._Last):
        def __call__(self, step: int) -> bool:
            taken.append(step)
            if len(taken) == (self.steps * 3) // 4 + 1:
                raise Killed  # nothing is saved on the way out
            return super().__call__(step)

    def end(*_: Any) -> None:
        raise Killed

    taken, asked = list[int](), plan(minutes=0.3, losses=("jsd",), forms=("tuned",))
    monkeypatch.setattr(runs, "_Last", Noted)
    monkeypatch.setattr(stages, "distilled", end)
    for _ in range(2):
        with pytest.raises(Killed):
            run_alignment("target", "draft", PROMPTS, asked, clock=ticking())
    killed = next(place for place, (one, other) in enumerate(itertools.pairwise(taken)) if other <= one)
    steps = json.loads((here / "made-work" / "planned.json").read_text())["trial-0"]
    assert steps > 8 and 0 < taken[killed + 1] - 1 and taken[killed] - taken[killed + 1] < steps // 4
    assert json.loads((here / "made-work" / "trials.json").read_text())[0]["point"]["step"] == taken[-1] >= steps // 2


def test_a_form_of_whose_steps_too_few_fit_is_left_out_and_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step_of(*given: Any) -> float:
        asked.append(given[2:])
        return 1e6 if len(asked) == 2 else 0.01

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    asked, said = list[Any](), list[str]()
    monkeypatch.setattr(runs, "_step_of", step_of)
    monkeypatch.setattr(runs, "MOST_STEPS", 8)
    monkeypatch.setattr(stages, "distilled", end)
    monkeypatch.setattr(runs, "TRIED", 0.9)
    given = plan(losses=("jsd", "lk-alpha", "tvd"), forms=("layers",), minutes=1)
    with pytest.raises(KeyboardInterrupt):
        run_alignment("target", None, PROMPTS, given, clock=ticking(), say=said.append)
    trials = json.loads((here / "made-work" / "trials.json").read_text())
    assert [one["loss"] for one in trials] == ["jsd", "tvd"] and asked[0] == (math.inf,) > asked[1]
    assert any(one.startswith("Not tried, ") and one.endswith(": layers by lk-alpha.") for one in said)


def test_of_several_forms_one_that_fails_is_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first form fails when it is made to learn; where all do the call ends in the reason."""
    made = runs.Distilling.new

    def new(self: Any, form: Any, loss: str) -> Any:
        if form.word in wrong:
            raise InvalidParameter(f"{form.word} cannot be had.")
        return made(self, form, loss)

    wrong, said = {"layers", "mixing"}, list[str]()
    monkeypatch.setattr(runs.Distilling, "new", new)
    found = run_alignment("target", None, PROMPTS, plan(losses=()), clock=ticking(), say=said.append)
    assert found.form == "small" and "layers by fkl+lk-alpha was left out: layers cannot be had." in said
    assert not any(one.startswith("Not tried, ") and "layers" in one for one in said)
    assert not [*(here / "made-work").glob("trial-*")] and len([*(here / "made-work").glob("begun-*")]) == 1
    wrong.add("small")
    with pytest.raises(InvalidParameter, match="cannot be had"):
        run_alignment("target", None, PROMPTS, plan(losses=(), out=Path("none")), clock=ticking())


def test_half_deleted_checkpoints_of_a_trial_are_not_gone_on_from(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def half(path: Any, **_: Any) -> None:
        if str(path).endswith("trial-0-over") and path.is_dir():
            for one in path.rglob("*.safetensors"):
                one.unlink()
            raise Killed

    asked = plan(losses=("jsd",), forms=("tuned",))
    with monkeypatch.context() as patched:
        patched.setattr(runs.shutil, "rmtree", half)
        with pytest.raises(Killed):
            run_alignment("target", "draft", PROMPTS, asked, clock=ticking())
    assert json.loads((here / "made-work" / "trials.json").read_text())
    assert run_alignment(
        "target", "draft", PROMPTS, plan(losses=("jsd",), forms=("tuned",), minutes=1), clock=ticking()
    ).folder
    assert not [*(here / "made-work").glob("trial-*")]


def test_what_trials_learnt_from_and_which_won_stay_with_more_minutes(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "compare", end)
    monkeypatch.setattr(runs, "TRIED", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_alignment("target", "draft", PROMPTS, plan(), clock=ticking())
    work = here / "made-work"
    trials, texts = (work / "trials.json").read_text(), {*(work / "text").iterdir()}
    assert len(json.loads(trials)) == 1, "there was no time for the second"
    monkeypatch.setattr(runs, "TRIED", 0.9)
    with pytest.raises(KeyboardInterrupt):
        run_alignment("target", "draft", PROMPTS, plan(minutes=2), clock=ticking())
    assert (work / "trials.json").read_text() == trials and {*(work / "text").iterdir()} == texts


def test_damaged_weights_of_a_trial_are_not_told_as_a_full_disk(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stages, "distilled", end)
        run_alignment("target", "draft", PROMPTS, plan(losses=("jsd",)), clock=ticking())
    begun = here / "made-work" / "begun-0.safetensors"
    begun.write_bytes(begun.read_bytes()[:100])
    with pytest.raises(ResultsError, match=r"begun-0\.safetensors cannot be gone on with; begin in an empty folder"):
        run_alignment("target", "draft", PROMPTS, plan(losses=("jsd",)), clock=ticking())


def test_a_point_that_is_no_number_is_neither_kept_nor_drawn(tmp_path: Path) -> None:
    curve = [CurvePoint(step, {"1": value}, value, {"1": 0.5}, 0.0) for step, value in ((0, math.nan), (5, 2.0))]
    assert best_of(curve) is curve[1] and [line[:12] for line in curve_lines(curve)] == ["step      5 #"[:12]]
    assert kept_best(tmp_path) == (None, []) and not [*tmp_path.iterdir()], "who asks leaves nothing"


def test_too_few_minutes_to_measure_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "PASSES", 100_000)
    with pytest.raises(InvalidParameter, match=r"--minutes 0.2 are too few: measuring what drafts cost takes about"):
        run_alignment("target", "draft", PROMPTS, plan(), clock=ticking())


def test_another_seed_is_refused_in_the_same_work_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "cost_of", lambda *_: LOSES)
    run_alignment("target", "draft", PROMPTS, plan(), clock=ticking())
    with pytest.raises(polydraft.PolydraftError, match="an alignment with another seed; name an empty folder"):
        run_alignment("target", "draft", PROMPTS, plan(seed=5), clock=ticking())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon"])
def test_every_form_is_made_learns_and_loads_where_there_is_time_for_all(
    here: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """For a target of two layers; places of GPT-2 are learned, and its context is as long as its texts."""
    tokenizer = AutoTokenizer.from_pretrained(here / "target")
    for name, draft in (("target", False), ("draft", True)):
        (here / name).unlink()
        made: Any = tiny_model(kind, 320, seed=draft, dtype=torch.float32, **{LAYERS[kind]: 2 - draft})
        made.save_pretrained(here / name)
        tokenizer.save_pretrained(here / name)
    monkeypatch.setattr(stages, "TRIAL", 0.001)
    monkeypatch.setattr(runs, "TRIED", 1e6)
    monkeypatch.setattr(runs, "LEAST_STEPS", 1)
    monkeypatch.setattr(runs, "MOST_STEPS", 2)
    monkeypatch.setattr(runs, "MEASURED", 1e-6)
    loaded, said, own = list[str](), list[str](), runs._trial

    def trial(distilling: Any, arms: Any, number: int, *given: Any, **named: Any) -> Any:
        found, (form, loss) = own(distilling, arms, number, *given, **named), arms[number]
        draft = distilling.new(form, loss)
        read_weights(draft.training, distilling.work.path / found["weights"])
        runs.keep_best(distilling, draft, form, CurvePoint(**found["point"]))
        check_drafts(runs.best_folder(distilling.work))
        loaded.append(form.word)
        return found

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_trial", trial)
    monkeypatch.setattr(stages, "distilled", end)
    count, asked = itertools.count(), plan(minutes=1.0, losses=())
    with pytest.raises(KeyboardInterrupt):
        run_alignment("target", "draft", PROMPTS, asked, clock=lambda: 1e-3 * next(count), say=said.append)
    trials = json.loads((here / "made-work" / "trials.json").read_text())
    assert {one["form"] for one in trials} == {*loaded} == {*GIVEN, *UNASKED} - {*CANNOT[kind]}
    for form, why in CANNOT[kind].items():
        assert any(one.startswith(f"{form}: ") and why in one for one in said)
    assert not any("was left out" in one or one.startswith("Not tried") for one in said)
    assert all(one["value"] > 0 for one in trials)


def test_the_work_folder_keeps_to_its_bytes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as few as the refusal names, behind every step of every run and wherever weights are written.

    Checkpoints, of which three may be there at once, are the most of it.
    """
    tokenizer = AutoTokenizer.from_pretrained(here / "target")
    (here / "draft").unlink()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    made: Any = tiny_model("llama", 320, seed=1, dtype=torch.float32, **sizes)
    made.save_pretrained(here / "draft")
    tokenizer.save_pretrained(here / "draft")

    def watched(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def then(*given: Any, **named: Any) -> Any:
            found = own(*given, **named)
            files = [one for one in (here / "other-work").rglob("*") if one.is_file()]
            seen.append({str(one): one.stat().st_size for one in files})
            return found

        monkeypatch.setattr(owner, name, then)

    seen, losses = list[dict[str, int]](), ("jsd", "lk-alpha", "tvd", "fkl", "rkl", "adaspec")
    for owner, name in (
        (runs, "write_weights"),
        (runs, "keep_best"),
        (runs.Distilling, "point"),
        (runs._Last, "__call__"),
    ):
        watched(owner, name)
    with pytest.raises(InvalidParameter, match="--most-bytes 1000 are too few") as refused:
        run_alignment(
            "target", "draft", PROMPTS, plan(most_bytes=1000, losses=losses, forms=("tuned",)), clock=ticking()
        )
    most = int(str(refused.value).split("give ")[1].split()[0])
    asked = plan(most_bytes=most, losses=losses, forms=("tuned",), minutes=3, out=Path("other"))
    assert run_alignment("target", "draft", PROMPTS, asked, clock=ticking()).folder
    largest = max(sum(one.values()) for one in seen)
    kept = [sum(size for name, size in one.items() if "/checkpoint-" in name) for one in seen]
    assert len({*kept}) > 2 and largest + max(kept) / 2 <= most, "with a third that is being written"
    assert not any(len([name for name in one if "begun-" in name]) > 2 for one in seen)
