"""Making heads: what the target writes, runs that go on where they were interrupted, and folders that draft."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import plain_logits, tiny_model
from heads import mtp_drafter
from safetensors.torch import load_file
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain
from polydraft.cli.train import plan_of, run_train_head
from polydraft.drafters import HeadDrafter, owned_networks, write_block
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds
from polydraft.drafters.heads.paths import GatedMarkov, Markov, PathTerm, RecurrentMarkov
from polydraft.engine import as_drafter, draft_for
from polydraft.errors import CheckpointError, InvalidParameter, ResultsError
from polydraft.models import HuggingFaceModel
from polydraft.options.commands.making_options import TrainHeadOptions
from polydraft.probs import Noise
from polydraft.training import MAKERS, HeadPlan, HeadRecipe, HeadSize, WritingPlan, make_head, usual_form
from polydraft.training.heads.head_making import networks_of, run_name
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.new_heads import usual_reads
from polydraft.training.heads.shards import continued, most_written, write_shards

VOCAB, LENGTH = 24, 32
DECODERS = {kind: maker for kind, maker in MAKERS.items() if not maker.encodes}
"""The kinds whose target is a decoder alone."""
WRITING = WritingPlan(tokens=200, length=LENGTH, rows=4)
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [3, 8])]


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, dtype=torch.float32)


def write(folder: Path, writing: WritingPlan = WRITING, **changes: Any) -> list[Path]:
    given = {"prompts": PROMPTS, "reads": (1, 2), "end_ids": (), **changes}
    found = write_shards(HuggingFaceModel(target()), folder=folder, writing=writing, **given)
    return [*found.held_out, *found.learnt]


# What the target writes.


def test_texts_are_what_the_target_would_write_and_states_are_those_of_a_plain_pass() -> None:
    heats = torch.tensor([0.0, 1.0, 0.0])
    (random,) = Noise.from_seed(3, 1).generators
    found = continued(HuggingFaceModel(target()), PROMPTS[:3], heats, LENGTH, (0, 2), random)
    with torch.no_grad():
        plain = target()(found["ids"].long(), output_hidden_states=True)
    for row, prompt in enumerate(PROMPTS[:3]):
        count = len(prompt)
        assert found["ids"][row, :count].tolist() == prompt.tolist()
        assert found["valid"][row].tolist() == [0] * count + [1] * (LENGTH - count)
        if not heats[row]:
            for place in range(count, LENGTH):
                assert found["ids"][row, place] == plain_logits(target(), found["ids"][row, :place].tolist()).argmax()
    states = torch.cat([plain.hidden_states[0], plain.hidden_states[2]], -1)
    torch.testing.assert_close(found["final"].float(), plain.hidden_states[-1], atol=0.05, rtol=0.02)
    first = states.shape[-1] // 2  # the last layer's output is behind the norm there
    torch.testing.assert_close(found["features"][..., :first].float(), states[..., :first], atol=0.05, rtol=0.02)
    behind = slice(max(map(len, PROMPTS[:3])), LENGTH)  # no sum is asked for before the last token of a prompt
    wanted = plain.logits.logsumexp(-1)
    torch.testing.assert_close(found["lse"][:, behind], wanted[:, behind], atol=1e-4, rtol=1e-4)
    for row, prompt in enumerate(PROMPTS[:3]):
        torch.testing.assert_close(found["lse"][row, len(prompt) - 1 :], wanted[row, len(prompt) - 1 :])


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("heats", [(1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.75, 0.5, 0.0)])
def test_every_prompt_gets_each_temperature_in_turn_and_is_greedy_once(
    count: int, heats: tuple[float, ...], tmp_path: Path
) -> None:
    writing = WritingPlan(tokens=24 * LENGTH, length=LENGTH, rows=24)
    found = write_shards(HuggingFaceModel(target()), PROMPTS, tmp_path, (), writing, held_out=count, heats=heats)
    (held,) = (load_file(one) for one in found.held_out)
    turns = [held["heat"][place::count].tolist() for place in range(count)]
    for own in turns:
        assert sorted(own[: len(heats)]) == sorted(heats) and own.count(0.0) == 1


def test_what_follows_an_end_is_not_learnt_unless_asked(tmp_path: Path) -> None:
    ends = (2, 5, 11)
    cut, whole = (
        load_file(write(tmp_path / str(past), replace(WRITING, past_end=past), end_ids=ends)[1])
        for past in (False, True)
    )
    assert torch.equal(cut["ids"], whole["ids"]) and bool((cut["valid"] < whole["valid"]).any())
    for ids, valid, written in zip(cut["ids"], cut["valid"], whole["valid"], strict=True):
        seen = False
        for token, one, own in zip(ids.tolist(), valid.tolist(), written.tolist(), strict=True):
            assert one == int(own and not seen)
            seen = seen or bool(own and token in ends)


def test_writing_goes_on_with_the_shard_that_is_missing(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert [one.name for one in files] == [
        "held-00000.safetensors",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    before = [load_file(one) for one in files]
    files[1].unlink()
    times = [one.stat().st_mtime_ns for one in (files[0], files[2])]
    after = [load_file(one) for one in write(tmp_path)]
    assert times == [one.stat().st_mtime_ns for one in (files[0], files[2])]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(write(tmp_path, replace(WRITING, tokens=400))) == 5  # more of the same text may follow
    first, held = load_file(files[1]), load_file(files[0])
    starts = {tuple(row[:2].tolist()) for row in first["ids"]}
    assert not starts & {tuple(row[:2].tolist()) for row in held["ids"]}


def test_text_that_was_written_otherwise_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ResultsError, match="holds text with another seed"):
        write(tmp_path, replace(WRITING, seed=2))
    with pytest.raises(ResultsError, match="another prompts"):
        write(tmp_path, prompts=PROMPTS[:3])
    (tmp_path / "writing.json").write_text("{")
    with pytest.raises(ResultsError, match="damaged"):
        write(tmp_path)


def test_too_few_prompts_and_too_much_text_are_refused(tmp_path: Path) -> None:
    why = r"at most 24 tokens, which is three quarters of a text \(length 32\); of 2 given 1 can be used"
    with pytest.raises(InvalidParameter, match=why):
        write(tmp_path, prompts=[torch.arange(20), torch.zeros(30, dtype=torch.int64)])
    with pytest.raises(InvalidParameter, match=r"take .* GB, and at most"):
        write(tmp_path, WritingPlan(tokens=10**9, length=LENGTH, most_bytes=10**6))
    with pytest.raises(InvalidParameter, match="at least 16 tokens"):
        WritingPlan(length=8)


def test_the_command_says_which_prompts_are_too_long_before_the_target_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An excerpt has 64 tokens, of which a text of 64 has room for 48."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("a", "b", "c = 1; " * 50))
    )
    monkeypatch.setattr("polydraft.cli.train.make_head", lambda *_: pytest.fail("not yet"))
    rows, folders = (str(tmp_path / "rows.jsonl"),), {"work": tmp_path / "work", "out": tmp_path / "out"}
    request = TrainHeadOptions(kind="medusa", prompts=rows, length=64, **folders)
    with pytest.raises(pytest.fail.Exception):
        run_train_head(request)
    assert "1 of 3 prompts left out: each is empty, or longer than 48 tokens, three quarters of --length 64.\n" in (
        capsys.readouterr().err
    )
    with pytest.raises(InvalidParameter, match="at most 48 tokens, which is three quarters"):
        run_train_head(replace(request, limit=1))


def test_the_tokens_of_a_smaller_head_are_the_most_written(tmp_path: Path) -> None:
    files = write(tmp_path)[1:]
    written = torch.cat([load_file(one)["ids"][load_file(one)["valid"].bool()].long() for one in files])
    counts = torch.bincount(written, minlength=VOCAB)
    kept = most_written(files, VOCAB, 6, torch.device("cpu"))
    assert kept is not None and kept.tolist() == sorted(kept.tolist())
    assert counts[kept].min() >= counts[[one for one in range(VOCAB) if one not in kept.tolist()]].max()
    assert most_written(files, VOCAB, VOCAB, torch.device("cpu")) is None


# Heads.


def plan(kind: str, **changes: Any) -> HeadPlan:
    recipe = HeadRecipe(steps=3, texts=4, measure_every=2, save_every=2)
    size = {"drafts": 3, "rank": 4 if MAKERS[kind].ranked else None, **changes.pop("size", {})}
    return HeadPlan(kind, HeadSize(**size), WRITING, recipe, **changes)


@pytest.mark.long(3)
@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, one in DECODERS.items() for form in one.forms])
def test_a_head_is_made_written_and_drafts_the_targets_text(kind: str, form: str, tmp_path: Path) -> None:
    asked = plan(kind, form=form, rows=16 if form in MAKERS[kind].fewer else None)
    made = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "head", asked)
    assert len(made.drafting.overlap) == 3 and 1 < made.drafting.efficiency < 4
    found = made.tokens_per_call
    measured = found is not None and all(1 <= calls[0] <= 2 and calls[-1] >= calls[0] for calls in found.values())
    assert measured or MAKERS[kind].tunes or not MAKERS[kind].path
    assert ("On text at temperature 1 a chain" in (tmp_path / "head" / "README.md").read_text()) == (found is not None)
    drafter = as_drafter(draft_for(tmp_path / "head", target()))
    assert sum(one.numel() for net in networks_of(drafter) for one in net.parameters()) >= made.parameters
    wanted: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone = polydraft.generate(target(), [PROMPTS[0].tolist()], drafter="none", **wanted)
    policy = Chain(3) if MAKERS[kind].is_model else None  # on so small a target no draft model pays
    found = polydraft.generate(target(), [PROMPTS[0].tolist()], drafter=drafter, policy=policy, **wanted)
    assert torch.equal(found.sequences, alone.sequences)
    assert not found.statistics.fallback and found.statistics.drafted > 0
    assert f"`polydraft train head {kind}`" in (tmp_path / "head" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["medusa", "medusa-2"])
def test_the_log_counts_calls_as_the_card_does(kind: str, tmp_path: Path) -> None:
    """Not products of mean overlaps, but where a target learns with its head; and to look changes no weight."""
    recipe = HeadRecipe(steps=2, texts=4, save_every=2, measure_every=1)
    asked = replace(plan(kind), recipe=recipe)
    quiet = replace(asked, recipe=replace(recipe, measure_every=9))
    alone = make_head(target(), PROMPTS, tmp_path / "quiet", tmp_path / "other", quiet)
    made = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "head", asked)
    (state,) = (tmp_path / "work").rglob("checkpoint-2/trainer_state.json")
    (told,) = [one for one in json.loads(state.read_text())["log_history"] if one["step"] == 2 and "overlaps" in one]
    if made.tokens_per_call is None:
        assert told["tokens_per_call_if_independent"] == made.drafting.efficiency
    else:
        assert told["tokens_per_call_as_a_block"] == made.tokens_per_call["as a block"][-1]
        assert told["tokens_per_call_token_by_token"] == made.tokens_per_call["token by token"][-1]
        assert "tokens_per_call_if_independent" not in told
    assert (made.tokens_per_call is None) == (kind == "medusa-2") and made.drafting == alone.drafting


@pytest.mark.parametrize("kind", MAKERS)
def test_fewer_rows_choose_a_form_that_has_so_few_unless_one_is_asked_for(kind: str) -> None:
    assert plan_of(TrainHeadOptions(kind=kind)).form == "official"
    fewer = MAKERS[kind].fewer
    if fewer:
        assert plan_of(TrainHeadOptions(kind=kind, rows=8)).form == ("official" if "official" in fewer else fewer[0])
    if "official" not in fewer:
        with pytest.raises(InvalidParameter, match=f"The official form of {re.escape(kind)} heads has all of a target"):
            plan_of(TrainHeadOptions(kind=kind, rows=8, form="official"))


@pytest.mark.long(1)
@pytest.mark.parametrize("term", ["gated", "rnn"])
@pytest.mark.parametrize("form", MAKERS["dspark"].forms)
def test_a_dspark_head_has_the_term_that_is_asked_for(term: str, form: str, tmp_path: Path) -> None:
    asked = plan("dspark", form=form, size={"term": term}, rows=16 if form in MAKERS["dspark"].fewer else None)
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "head", asked)
    (head, *_) = owned_networks(polydraft.load_head(tmp_path / "head", 2))
    assert type(head.path) is {"gated": GatedMarkov, "rnn": RecurrentMarkov}[term] and head.path.rank == 4


@pytest.mark.parametrize("frozen", [False, True])
def test_eagle_3_has_output_rows_of_its_own_which_begin_as_the_targets(frozen: bool, tmp_path: Path) -> None:
    asked = plan("eagle-3", rows=16, size={"frozen_rows": frozen})
    tokens = torch.arange(0, VOCAB, 2)
    ends = TargetEnds.of(target(), tokens)
    fresh = MAKERS["eagle-3"].make(target(), ends, usual_reads(2), asked.size)
    learnt = [name for name, _ in fresh.training.named_parameters() if "lm_head" in name]
    assert learnt == ([] if frozen else ["ends.lm_head.weight"])
    if not frozen:
        assert torch.equal(fresh.training.get_parameter("ends.lm_head.weight"), ends.rows)
    made = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "head", asked)
    found = load_file(tmp_path / "head" / "model.safetensors")
    theirs = target().get_output_embeddings().weight.detach()[found["t2d"]].bfloat16()
    assert found["lm_head.weight"].shape == theirs.shape
    assert torch.equal(found["lm_head.weight"], theirs) == frozen
    more = 0 if frozen else (16 - len(tokens)) * ends.rows.shape[1]
    assert made.parameters == sum(one.numel() for one in fresh.training.parameters()) + more
    assert ("from rows of its own" in (tmp_path / "head" / "README.md").read_text()) != frozen


@pytest.mark.parametrize("raw", [False, True])
def test_an_mtp_module_hands_on_what_the_one_that_it_begins_with_did(raw: bool) -> None:
    ends, start = TargetEnds.of(target()), mtp_drafter(raw=raw).network
    made: Any = MAKERS["mtp"].make(target(), ends, usual_reads(2), HeadSize(), start).drafter
    assert made.network.steps[0].raw == raw and made.network.anatomy == start.anatomy


def test_an_interrupted_run_goes_on_and_comes_to_the_same_head(tmp_path: Path) -> None:
    asked = plan("eagle-3")
    whole = make_head(target(), PROMPTS, tmp_path / "whole", tmp_path / "one", asked)
    short = replace(asked, recipe=replace(asked.recipe, save_every=2))
    make_head(target(), PROMPTS, tmp_path / "cut", tmp_path / "never", short)
    last = tmp_path / "cut" / run_name(short) / "checkpoint-3"
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    again = make_head(target(), PROMPTS, tmp_path / "cut", tmp_path / "two", short)
    assert again.drafting.overlap == pytest.approx(whole.drafting.overlap, abs=1e-6)


def test_an_interrupt_leaves_a_checkpoint_of_the_step_in_progress(tmp_path: Path) -> None:
    asked = plan("eagle-3")
    looks = list[int]()

    def at_once() -> bool:
        looks.append(1)
        return True

    with pytest.raises(KeyboardInterrupt):
        make_head(target(), PROMPTS, tmp_path / "cut", tmp_path / "never", asked, lambda: nullcontext(at_once))
    assert len(looks) == 1 and (tmp_path / "cut" / run_name(asked) / "checkpoint-1").is_dir()
    again = make_head(target(), PROMPTS, tmp_path / "cut", tmp_path / "two", asked)
    whole = make_head(target(), PROMPTS, tmp_path / "whole", tmp_path / "one", asked)
    assert again.drafting.overlap == pytest.approx(whole.drafting.overlap, abs=1e-6)


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("mixing", 16),
        ("dspark", None),
        ("xpress", 16),
        ("lilicorr", 16),
        ("medusa", None),
        ("eagle", None),
        ("hass", None),
        ("eagle-3", 16),
        ("p-eagle", 16),
        ("falcon", None),
        ("mtp", 16),
        ("mlp", 16),
        ("redrafter", 16),
        ("hydra++", 16),
    ],
)
def test_a_head_goes_on_from_the_weights_of_another(kind: str, rows: int | None, tmp_path: Path) -> None:
    form = usual_form(kind, rows)
    first = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "first", plan(kind, rows=rows, form=form))
    still = HeadRecipe(steps=1, texts=4, matrix_rate=0.0, other_rate=0.0, measure_every=1, save_every=1)
    asked = replace(plan(kind, start=tmp_path / "first", form=form), recipe=still)
    second = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "second", asked)
    assert second.drafting.overlap == pytest.approx(first.drafting.overlap, abs=5e-3)  # stored in bfloat16 in between
    one, other = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("first", "second"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert "It began with the weights of first." in (tmp_path / "second" / "README.md").read_text()


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("first", "second", "term"),
    [("mixing", "dspark", "rnn"), ("dspark", "mixing", None), ("dspark", "xpress", None), ("xpress", "lilicorr", None)],
)
def test_a_block_head_takes_the_layers_of_one_with_another_term(
    first: str, second: str, term: str | None, tmp_path: Path
) -> None:
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "first", plan(first, rows=16))
    still = HeadRecipe(steps=1, texts=4, matrix_rate=0.0, other_rate=0.0, measure_every=1, save_every=1)
    asked = replace(plan(second, start=tmp_path / "first", size={"term": term}), recipe=still)
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "second", asked)
    (given, *_), (head, *_) = (owned_networks(polydraft.load_head(tmp_path / name, 2)) for name in ("first", "second"))
    kept = {name: value for name, value in given.state_dict().items() if name.startswith(("fc.", "layers.", "norm."))}
    assert len(kept) > 10 and all(torch.equal(value, head.state_dict()[name]) for name, value in kept.items())
    assert type(head.path) is not type(given.path)
    sizes = [None if one.confidence is None else one.confidence.in_features for one in (given, head)]
    assert sizes[0] != sizes[1] or sizes == [None, None]


@pytest.mark.long(2)
@pytest.mark.parametrize("kind", ["dspark", "mixing", "xpress", "lilicorr", "eagle-3", "eagle", "p-eagle", "falcon"])
def test_a_head_that_begins_with_another_has_its_sizes_and_reads_what_it_reads(kind: str, tmp_path: Path) -> None:
    """Published heads have other sizes than ours have, and may read other layers of the target."""
    size = HeadSize(drafts=3, inner=24, rank=5 if MAKERS[kind].ranked else None)
    ends = TargetEnds.of(target(), torch.arange(0, VOCAB, 2) if kind not in ("eagle", "falcon") else None)
    first = MAKERS[kind].make(target(), ends, READ_BY.get(kind, ("final", 1)), size)
    first.write(tmp_path / "first", HuggingFaceModel(target()), "official", "")
    given = polydraft.load_head(tmp_path / "first", 2)
    asked = plan(kind, start=tmp_path / "first", size={"rank": None})
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "second", asked)
    found = polydraft.load_head(tmp_path / "second", 2)
    shapes = [
        {name: one.shape for name, one in owned_networks(each)[0].state_dict().items()} for each in (given, found)
    ]
    assert shapes[0] == shapes[1] and any(24 in shape for shape in shapes[0].values())
    assert found.needs.layers == given.needs.layers == READ_BY.get(kind, ("final", 1))


READ_BY: dict[str, tuple[Any, ...]] = {
    "eagle": ("final",),
    "falcon": ("final",),
    "eagle-3": (2, 1),
    "p-eagle": (2, 1),
}


def test_a_head_that_reads_the_last_states_learns_from_them(tmp_path: Path) -> None:
    """Behind the last norm, and not the last layer's output before it."""
    shape = replace(fresh_block().shape, reads=("final",))
    given = HeadDrafter(BlockHead(shape, PathTerm()), HeadEnds())
    write_block(given, tmp_path / "first", HuggingFaceModel(target()), target_layers=2)
    asked = plan("dspark", start=tmp_path / "first")
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "second", asked)
    assert polydraft.load_head(tmp_path / "second", 2).needs.layers == ("final",)
    for file in (tmp_path / "work" / "text").glob("*.safetensors"):
        text = load_file(file)
        assert torch.equal(text["features"], text["final"])


def fresh_block() -> BlockHead:
    """Return a new block head for the target."""
    (head, *_) = owned_networks(MAKERS["dspark"].make(target(), TargetEnds.of(target()), (1,), HeadSize()).drafter)
    assert isinstance(head, BlockHead)
    return head


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"target_width": 32},
            "reads states of width 32 and is 16 wide, and the target 16: it was trained for another",
        ),
        ({"mask_id": 30}, "mask of the head to begin with is token 30, and the target has 24 tokens"),
        ({"reads": (4,)}, "Hidden states are those of 0 to 2 layers or 'final', not 4"),
        ({"causal": (True, False)}, "some layers are causal and some are not can be written only if"),
    ],
)
def test_a_block_head_for_another_target_or_without_a_form_is_refused_before_the_target_writes(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = HeadDrafter(BlockHead(replace(fresh_block().shape, **changes), PathTerm()), HeadEnds())
    monkeypatch.setattr("polydraft.training.heads.head_making.load_head", lambda folder, layers: given)
    with pytest.raises(InvalidParameter, match=said):
        make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "h", plan("dspark", start=tmp_path / "first"))
    assert not (tmp_path / "work").exists()


def test_factors_at_the_ends_of_a_head_are_refused_and_its_depth_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = HeadDrafter(BlockHead(fresh_block().shape, PathTerm()), HeadEnds(softcap=5.0))
    monkeypatch.setattr("polydraft.training.heads.head_making.load_head", lambda folder, layers: first)
    with pytest.raises(InvalidParameter, match="scales its embeddings or caps its logits"):
        make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "h", plan("dspark", start=tmp_path / "first"))
    heads = MAKERS["medusa"].make(target(), TargetEnds.of(target()), (1,), HeadSize(layers=2, drafts=4)).drafter
    monkeypatch.setattr("polydraft.training.heads.head_making.load_head", lambda folder, layers: heads)
    asked = plan("medusa", start=tmp_path / "first", size={"drafts": None})
    made = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "medusa", asked)
    assert len(made.drafting.overlap) == 4


@pytest.mark.parametrize("path", [PathTerm(), Markov(VOCAB, VOCAB, 5)], ids=["dflash", "without a confidence head"])
def test_a_dspark_head_may_begin_with_what_has_no_term_or_no_confidence(path: PathTerm, tmp_path: Path) -> None:
    """DFlash's anchors do not draft, so that its block has a slot more than it has drafts."""
    shape = replace(fresh_block().shape, shifted=False, block=4)
    given = BlockHead(shape, path)
    write_block(HeadDrafter(given, HeadEnds()), tmp_path / "first", HuggingFaceModel(target()), target_layers=2)
    asked = plan("dspark", start=tmp_path / "first", size={"rank": None})
    made = make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "second", asked)
    (head, *_) = owned_networks(polydraft.load_head(tmp_path / "second", 2))
    assert len(made.drafting.overlap) == 3 and head.shape.block == 4 and not head.shape.shifted
    assert head.confidence is not None and head.path.rank == (64 if type(path) is PathTerm else 5)


def test_a_head_of_another_kind_or_size_is_no_beginning(tmp_path: Path) -> None:
    make_head(target(), PROMPTS, tmp_path / "work", tmp_path / "first", plan("dspark"))
    for kind, changes, said in [
        ("medusa", {}, "is a block head, and the new head is a medusa"),
        ("dspark", {"size": {"layers": 1}}, "begin with has 2 layers, not 1; leave layers out"),
        ("mixing", {"size": {"layers": 3}}, "begin with has 2 layers, not 3"),
    ]:
        with pytest.raises(InvalidParameter, match=said):
            asked = plan(kind, start=tmp_path / "first", **changes)
            make_head(target(), PROMPTS, tmp_path / "other", tmp_path / "never", asked)
        assert not (tmp_path / "other").exists()
    with pytest.raises(InvalidParameter, match="leave rows out"):
        plan("dspark", start=tmp_path / "first", rows=16)
    with pytest.raises(InvalidParameter, match="a term of rank 4, not 7; leave rank out"):
        again = plan("dspark", start=tmp_path / "first", size={"rank": 7})
        make_head(target(), PROMPTS, tmp_path / "other", tmp_path / "never", again)
    with pytest.raises(InvalidParameter, match="leave inner out"):
        plan("dspark", start=tmp_path / "first", size={"inner": 8})
    with pytest.raises(CheckpointError, match="nowhere"):
        make_head(target(), PROMPTS, tmp_path / "o", tmp_path / "n", plan("dspark", start=tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 12},
        pytest.param({"size": {"layers": 2}}, marks=pytest.mark.slow),
        pytest.param({"size": {"inner": 8}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_head_on_the_same_text_does_not_go_on_from_the_first_ones_checkpoint(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    work = tmp_path / "work"
    make_head(target(), PROMPTS, work, tmp_path / "first", plan("dspark", rows=16))
    other = plan("dspark", **{"rows": 16, **changes})
    found = make_head(target(), PROMPTS, work, tmp_path / "second", other)
    fresh = make_head(target(), PROMPTS, tmp_path / "fresh", tmp_path / "third", other)
    assert found.drafting.overlap == pytest.approx(fresh.drafting.overlap, abs=1e-6)
    assert len([one for one in work.iterdir() if one.name.startswith("dspark-")]) == 2


@pytest.mark.wrong_types
def test_what_cannot_be_made_is_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match=r"kind medusa, medusa-2, mlp, .*, dspark, .*not 'lattice'"):
        HeadPlan("lattice")
    for kind, size, said in (
        ("hydra++", HeadSize(drafts=17), "hydra.. has at most 16 drafts, but 17 are asked for"),
        ("redrafter", HeadSize(layers=65), "redrafter has at most 64 layers, but 65 are asked for"),
        ("mlp", HeadSize(layers=5), "mlp has no layers, but 5 are asked for"),
    ):
        with pytest.raises(InvalidParameter, match=said):
            HeadPlan(kind, size)
    with pytest.raises(InvalidParameter, match="official or vllm, not 'speculators'"):
        HeadPlan("medusa", form="speculators")
    with pytest.raises(InvalidParameter, match="at least 1 token of its target's, not 0"):
        HeadPlan("eagle-3", rows=0)
    with pytest.raises(InvalidParameter, match="all of a target's tokens; take vllm, or leave rows out"):
        HeadPlan("medusa", rows=8)
    with pytest.raises(InvalidParameter, match="form of eagle heads has all of a target's tokens; leave rows out"):
        HeadPlan("eagle", rows=8)
    with pytest.raises(InvalidParameter, match="The official form of hydra heads has all of a target's tokens; take"):
        HeadPlan("hydra", rows=8)
    with pytest.raises(InvalidParameter, match="dspark has no rows that can be frozen; frozen rows are of eagle-3"):
        HeadPlan("dspark", HeadSize(frozen_rows=True))
    with pytest.raises(InvalidParameter, match="kind mixing has no term to choose; that is of dspark"):
        HeadPlan("mixing", HeadSize(term="rnn"))
    with pytest.raises(InvalidParameter, match="kind medusa has no term of a rank; that is of dspark or xpress"):
        HeadPlan("medusa", HeadSize(rank=64))
    with pytest.raises(InvalidParameter, match=r"lilicorr learns by the loss published or .*, not lk-lambda"):
        HeadPlan("lilicorr", HeadSize(loss="lk-lambda"))
    with pytest.raises(InvalidParameter, match="term is vanilla, gated, rnn, not 'lstm'"):
        HeadSize(term="lstm")
    for rate in (-0.1, float("nan"), 2.0):
        with pytest.raises(InvalidParameter, match=f"learning rate is in .0, 1., but is {rate}"):
            HeadRecipe(matrix_rate=rate)
    with pytest.raises(InvalidParameter, match="drafts must be at least 1, but is 0"):
        HeadSize(drafts=0)
    with pytest.raises(
        InvalidParameter, match="published, entropy, acceptance, d-pace, lk-alpha, lk-lambda, not 'best'"
    ):
        HeadSize(loss="best")


@pytest.mark.parametrize(
    ("kind", "loss"), [("eagle", "entropy"), ("eagle-3", "d-pace"), ("medusa", "d-pace"), ("falcon", "d-pace")]
)
def test_a_loss_that_a_kind_has_not_is_refused_before_the_target_writes(kind: str, loss: str) -> None:
    with pytest.raises(InvalidParameter, match=f"kind {kind} learns by the loss published.*, not {loss}"):
        HeadPlan(kind, size=HeadSize(loss=loss))


def first_of(kind: str, loss: str) -> bool:
    """Tell whether a kind has its first loss here, or a loss its first kind."""
    kinds = [one for one in DECODERS if loss in MAKERS[one].losses]
    return loss == MAKERS[kind].losses[0] or kind == kinds[0]


LEARNT = [(kind, loss) for kind in DECODERS for loss in MAKERS[kind].losses]


@pytest.mark.long(2)
@pytest.mark.parametrize(
    ("kind", "loss"),
    [pytest.param(kind, loss, marks=[] if first_of(kind, loss) else pytest.mark.slow) for kind, loss in LEARNT],
)
def test_every_kind_learns_by_each_of_its_losses(kind: str, loss: str, tmp_path: Path) -> None:
    made = make_head(target(), PROMPTS, tmp_path / "w", tmp_path / "h", plan(kind, size={"loss": loss}))
    assert all(0 <= one <= 1 for one in made.drafting.overlap)
    assert f"loss: {loss}" in (tmp_path / "h" / "README.md").read_text()


@pytest.mark.parametrize(("layers", "reads"), [(30, (2, 15, 27)), (14, (2, 7, 11)), (3, (1, 2)), (2, (1,)), (1, (0,))])
def test_the_layers_that_heads_read(layers: int, reads: tuple[int, ...]) -> None:
    assert usual_reads(layers) == reads
