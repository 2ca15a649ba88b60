"""Distilling draft models: losses by words, texts of several temperatures, and forms that draft what they learnt."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from doubles import perturbed, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from polydraft.drafters import drafter_of
from polydraft.errors import InvalidParameter, ResultsError
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams, to_probs
from polydraft.training.alignment.divergences import mixture_divergence
from polydraft.training.alignment.draft_forms import (
    FORMS,
    Material,
    block_influence,
    draft_form,
    kept_layers,
    narrowed,
    principal,
)
from polydraft.training.alignment.draft_losses import CHAIN, DRAFT_LOSSES, draft_loss
from polydraft.training.alignment.draft_training import DraftTraining, splits
from polydraft.training.alignment.held_out import HeldOutTexts, score, tokens_per_call
from polydraft.training.alignment.own_text import OwnTexts, chains_of_text
from polydraft.training.alignment.text_calls import expected_calls
from polydraft.training.heads.loop import HeadRecipe, run_steps
from polydraft.training.heads.losses import row_losses
from polydraft.training.heads.losses.row_losses import HeadBatch, TargetEnds, forward_divergence
from polydraft.training.heads.shards import Shards, WritingPlan, write_shards

VOCAB, LENGTH = 24, 20
PROMPTS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [9, 3, 2], [3, 8], [7])]
HEATS = (1.0, 0.0, 0.6)
NONE: Mapping[str, float] = {}
FILTERS = (NONE, {"top_p": 0.7}, {"top_k": 3, "min_p": 0.2})


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, dtype=torch.float32, initializer_range=0.3, num_hidden_layers=3)


@cache
def model() -> HuggingFaceModel:
    return HuggingFaceModel(target())


@cache
def batch() -> HeadBatch:
    """Return texts that a target has read, with a prompt of another length and a temperature each."""
    ids = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = target()(ids, output_hidden_states=True)
    valid = torch.ones_like(ids)
    valid[0, :4], valid[1, :2], valid[2, :7], valid[1, 9:] = 0, 0, 0, 0
    final = found.hidden_states[-1]
    return HeadBatch(ids, valid, final[..., :0], final, found.logits.logsumexp(-1), torch.tensor(HEATS))


def training(loss: str, scale: float = 0.1, filters: Mapping[str, float] = NONE) -> DraftTraining:
    network, ends, reference = perturbed(target(), scale), TargetEnds.of(target()), None
    params = SamplingParams(temperature=0.8, **filters)  # pyright: ignore[reportArgumentType]
    if draft_loss(loss).share < 1:
        reference = DraftTraining(perturbed(target(), 0.7 * scale, 5), ends, draft_loss("fkl"), params)
    return DraftTraining(network, ends, draft_loss(loss), params, reference)


def expected(loss: str, one: DraftTraining) -> Tensor:
    """Return a loss as its definition has it, text by text and place by place."""
    texts, total, count, calls, tokens = batch(), [], 0, [], 0
    kind = DRAFT_LOSSES[loss]
    drafted, wanted = one.network(texts.ids).logits, target()(texts.ids).logits.detach()
    for row, heat in enumerate(HEATS):
        places = texts.valid[row].nonzero().flatten()
        at = heat or 0.8
        logits, law = drafted[row, places - 1] / at, (wanted[row, places - 1] / at).softmax(-1)
        total.append(kind.rows(logits, law))
        count += len(places)
        if kind.paths is not None and heat:
            own = texts.ids[row, places].unsqueeze(-1)
            ratio = (logits.softmax(-1).gather(-1, own) / law.gather(-1, own)).squeeze(-1)
            overlap = torch.minimum(logits.softmax(-1), law).sum(-1)
            calls.append(of_text(loss, *(chains_of(one, len(places)) for one in (ratio, overlap))))
            tokens += len(places)
    mean = torch.cat(total).sum() / count
    return kind.weight * mean + (torch.stack(calls).sum() / tokens if calls else 0)


def chains_of(values: Tensor, count: int) -> list[Tensor]:
    """Return the values of the chain that begins at every place, no further than the text goes."""
    return [
        torch.nn.functional.pad(values[place : place + CHAIN], (0, max(0, place + CHAIN - count)))
        for place in range(count)
    ]


def of_text(loss: str, ratios: list[Tensor], overlaps: list[Tensor]) -> Tensor:
    """Return a loss of a whole text by its definition."""
    kept = [
        (one.cumprod(-1).cummin(-1).values if "token" not in loss else one.clamp_max(1).cumprod(-1)).clamp_max(1)
        for one in ratios
    ]
    if loss.startswith("calls"):
        return expected_calls(torch.stack(kept)[None], torch.tensor([len(kept)])).sum()
    if loss == "products":
        return torch.stack([1 - one.cumprod(-1).sum() / CHAIN for one in overlaps]).sum()
    if loss == "accepted":
        return torch.stack([1 - one.sum() / CHAIN for one in kept]).sum()
    before = [torch.cat([torch.ones(1), one[:-1]]) for one in kept]
    return torch.stack([1 - (one * own).sum() / CHAIN for one, own in zip(before, overlaps, strict=True)]).sum()


DRAWN = "tvd++"
WHOLE = [word for word, loss in DRAFT_LOSSES.items() if loss.share == 1 and word != DRAWN]


def test_a_filtered_loss_is_the_mean_over_the_rows_that_the_reference_finds_easier() -> None:
    one, texts = training("adaspec"), batch()
    rows = [all_rows(network, "fkl") for network in (one.network, perturbed(target(), 0.07, 5))]
    gaps = (rows[0] - rows[1]).detach()
    kept = gaps.argsort(descending=True)[: round(0.4 * len(gaps))]
    found = one(**vars(texts))["loss"].detach()
    torch.testing.assert_close(found, rows[0][kept].mean().detach(), rtol=1e-4, atol=1e-5)
    assert abs(float(found - rows[0].mean().detach())) > 1e-3
    assert not any("reference" in name for name, _ in one.named_parameters())
    with pytest.raises(InvalidParameter, match="give a reference"):
        DraftTraining(perturbed(target(), 0.1), TargetEnds.of(target()), draft_loss("adaspec"))


def all_rows(network: PreTrainedModel, loss: str) -> Tensor:
    """Return a loss of all rows."""
    texts, found = batch(), []
    drafted, wanted = network(texts.ids).logits, target()(texts.ids).logits.detach()
    for row, heat in enumerate(HEATS):
        places, at = texts.valid[row].nonzero().flatten() - 1, heat or 0.8
        found.append(DRAFT_LOSSES[loss].rows(drafted[row, places] / at, (wanted[row, places] / at).softmax(-1)))
    return torch.cat(found)


def test_a_drawn_loss_goes_down_the_total_variation() -> None:
    """The mean of many draws has the direction of the sum's gradient, and the same draws are made again for it."""
    one, texts = training(DRAWN), batch()
    weights = one.network.get_output_embeddings().weight  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        slopes = [torch.autograd.grad(one(**vars(texts))["loss"], weights)[0] for _ in range(200)]
    exact = torch.autograd.grad(all_rows(one.network, "tvd").mean(), weights)[0]
    mean = torch.stack(slopes).mean(0)
    assert float(torch.cosine_similarity(mean.flatten(), exact.flatten(), 0)) > 0.7
    assert not torch.equal(slopes[0], slopes[1])


def test_parts_of_a_batch_are_equally_long_so_that_none_is_a_single_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_losses, "STATES", 4)
    seen, given = list[int](), torch.arange(9.0)

    def rows(part: Tensor) -> tuple[Tensor, ...]:
        seen.append(len(part))
        return (part,)

    assert torch.equal(row_losses.few_at_a_time(rows, given)[0], given) and seen == [3, 3, 3]
    assert len(row_losses.few_at_a_time(rows, given[:0])[0]) == 0


@pytest.mark.parametrize("loss", WHOLE)
def test_a_loss_is_its_definition_at_the_texts_own_temperatures(loss: str) -> None:
    one, texts = training(loss), batch()
    found, wanted = one(**vars(texts))["loss"], expected(loss, one)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weights = one.network.get_output_embeddings().weight  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    slopes = [torch.autograd.grad(value, weights)[0] for value in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-5)
    assert float(slopes[0].abs().max()) > 1e-4


def test_losses_differ_and_unknown_ones_are_refused() -> None:
    texts = batch()
    found = {loss: float(training(loss)(**vars(texts))["loss"].detach()) for loss in WHOLE}
    assert len({round(value, 5) for value in found.values()}) == len(found)
    with pytest.raises(InvalidParameter, match=r"learns by the loss fkl.*not 'jsb'"):
        draft_loss("jsb")
    logits, law = torch.randn(2, 5), torch.rand(2, 5).softmax(-1)
    assert torch.allclose(DRAFT_LOSSES["jsd"].rows(logits, law), mixture_divergence(logits, law, 0.5))
    assert torch.allclose(DRAFT_LOSSES["calls"].rows(logits, law), forward_divergence(logits, law))


@pytest.mark.parametrize("filters", FILTERS, ids=["whole", "top-p", "top-k min-p"])
@pytest.mark.parametrize("heat", [0.0, 0.6, 1.0])
def test_chains_of_one_pass_are_those_of_a_drafter_that_is_asked_place_by_place(
    heat: float, filters: Mapping[str, float]
) -> None:
    """These texts are not the target's, which may never write a token that it filters out."""
    one, texts = training("fkl", 0.03, filters).eval(), batch()
    given, written = texts.valid.argmax(-1), texts.valid.sum(-1)
    params = SamplingParams(temperature=heat, **filters)  # pyright: ignore[reportArgumentType]
    own = OwnTexts(texts.ids, given, written)
    wanted = chains_of_text(model(), drafter_of(one.network), own, params, 3)
    found = one.chains(texts, heat, 3)
    assert torch.equal(found.written, wanted.written)
    for row, count in enumerate(written.tolist()):
        for depth in range(3):
            last = count - depth
            if heat:
                values = (found.ratio[row, :last, depth], wanted.ratio[row, :last, depth])
                torch.testing.assert_close(*(each.clamp_max(1e6) for each in values), rtol=2e-3, atol=1e-5)
                overlaps = (found.overlap[row, :last, depth], wanted.overlap[row, :last, depth])
                torch.testing.assert_close(*overlaps, rtol=2e-3, atol=1e-5)
            else:  # texts are not greedy here, where alone a chance of the target's is not 0
                asked = texts.ids[row, given[row] + depth : given[row] + count]
                best = one.network(texts.ids).logits[row, given[row] + depth - 1 : given[row] + count - 1].argmax(-1)
                assert torch.equal(found.ratio[row, :last, depth], (best == asked).double())


def shards(folder: Path, heats: tuple[float, ...] = (1.0, 0.0)) -> tuple[list[Path], list[Path]]:
    plan = WritingPlan(tokens=960, length=LENGTH, rows=12)
    found = write_shards(model(), PROMPTS, folder, (), plan, held_out=2, heats=heats)
    return found.learnt, found.held_out


def test_rows_of_a_filtered_target_are_learnt_by_the_whole_rows_of_the_draft() -> None:
    """What the draft filters out by now has a slope, and the law is the target's filtered one."""
    one, texts = training("fkl", 0.1, {"top_k": 2}), batch()
    wanted = []
    for row, heat in enumerate(HEATS):
        places, at = texts.valid[row].nonzero().flatten() - 1, heat or 0.8
        scores = target()(texts.ids).logits.detach()[row, places] / at
        kept = scores >= scores.topk(2).values[:, -1:]
        law = scores.masked_fill(~kept, -torch.inf).softmax(-1)
        wanted.append(forward_divergence(one.network(texts.ids).logits[row, places] / at, law))
    found = one(**vars(texts))["loss"]
    torch.testing.assert_close(found, torch.cat(wanted).mean(), rtol=1e-4, atol=1e-5)
    assert float((found - training("fkl")(**vars(texts))["loss"]).detach().abs()) > 1e-2


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 3, "min_p": 0.1}])
@pytest.mark.parametrize("some", [False, True])
def test_heads_learn_the_filtered_law_of_all_tokens(some: bool, filters: dict[str, float]) -> None:
    """Also those of fewer tokens: what is filtered follows from all of the target's."""
    ids, params = torch.arange(24).view(2, 12) % model().vocab_size, SamplingParams(**filters)  # type: ignore[arg-type]
    tokens = torch.tensor([0, 3, 4, 9]) if some else None
    with torch.no_grad():
        found = model().model(ids, output_hidden_states=True)
    form = draft_form("vocabulary" if some else "medusa")
    ends = replace(TargetEnds.of(model().model), filters=params)
    made = form.make(Material(model(), ends, tokens=tokens), form.losses[0]).training
    (own,) = made.target  # type: ignore[attr-defined]
    laws, whole = own.laws(found.hidden_states[-1], found.logits.logsumexp(-1)), to_probs(found.logits.float(), params)
    torch.testing.assert_close(laws, whole if tokens is None else whole[..., tokens], atol=1e-5, rtol=1e-4)
    assert bool((laws == 0).any()) and own.filters == params


def test_text_is_written_under_the_filters_that_are_served(tmp_path: Path) -> None:
    plan, heats = WritingPlan(tokens=960, length=LENGTH, rows=12), (1.0,)
    files = write_shards(
        *(model(), PROMPTS, tmp_path, (), plan), held_out=2, heats=heats, filters=SamplingParams(top_k=2)
    )
    ranks = []
    for row in Shards(files.learnt):
        places = row["valid"].nonzero().flatten()
        logits = target()(row["ids"][None]).logits[0, places - 1]
        ranks += (logits > logits.gather(-1, row["ids"][places].unsqueeze(-1))).sum(-1).tolist()
    assert {*ranks} == {0, 1}  # the second likeliest too, and never the third
    with pytest.raises(ResultsError, match="holds text with another top_k"):
        write_shards(*(model(), PROMPTS, tmp_path, (), plan), held_out=2, heats=heats, filters=SamplingParams(top_k=3))


@pytest.mark.parametrize("form", ["tuned", "lora", "boost:2", "boost:2:samples"])
def test_a_draft_learns_from_shards_without_features_and_is_worth_more_on_held_out_text(
    form: str, tmp_path: Path
) -> None:
    learnt, held = shards(tmp_path / "text")
    given = perturbed(target(), 0.15)
    head = draft_form(form).make(Material(model(), TargetEnds.of(target()), given), "jsd")
    texts = HeldOutTexts.of(model(), held, (0.0, 1.0))
    assert {heat: len(rows) for heat, rows in texts.rows.items()} == {0.0: 2, 1.0: 10}
    before = tokens_per_call(texts.worth(head))
    steps = list[int]()

    def after(step: int, log: object) -> bool:
        steps.append(step)
        return step == 30

    recipe = HeadRecipe(steps=40, matrix_rate=4e-3, other_rate=4e-3, save_every=1000)
    run_steps(head.training, Shards(learnt, heats=True), tmp_path / "run", recipe, after)
    assert steps == [*range(1, 31)] and not [*(tmp_path / "run").glob("checkpoint-*")]
    assert score(tokens_per_call(texts.worth(head))) > score(before) + 0.1
    assert torch.equal(given.lm_head.weight, perturbed(target(), 0.15).lm_head.weight)  # the user's own stays


def test_writing_ends_when_it_is_told_to_and_never_before_there_is_something_to_learn(tmp_path: Path) -> None:
    plan = WritingPlan(tokens=960, length=LENGTH, rows=12)
    found = write_shards(model(), PROMPTS, tmp_path, (), plan, held_out=2, going=lambda: False)
    assert len(found.learnt) == len(found.held_out) == 1
    more = write_shards(model(), PROMPTS, tmp_path, (), plan, held_out=2)
    assert len(more.learnt) == 4


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("form", ["lora", "layers", "width", "small", "mixing", "vocabulary", "pard", "boost:3"])
def test_a_form_is_made_drafts_and_is_written(form: str, given: bool, tmp_path: Path) -> None:
    from polydraft.engine import draft_for

    start = perturbed(target(), 0.1) if given else None
    material = Material(model(), TargetEnds.of(target()), start, texts=batch().ids)
    kind = draft_form(form)
    if form == "lora" and not given:
        with pytest.raises(InvalidParameter, match="no draft model"):
            kind.make(material, kind.losses[0])
        return
    made = kind.make(material, kind.losses[0])
    made.write(tmp_path / "made", model(), kind.folder, "A card.")
    assert (tmp_path / "made" / "README.md").read_text() == "A card."
    assert draft_for(tmp_path / "made", target()) is not None
    if form == "layers":
        assert made.training.network.config.num_hidden_layers == 1  # pyright: ignore[reportAttributeAccessIssue]
        assert splits(made.training.network)  # pyright: ignore[reportArgumentType]


def test_heads_are_told_of_no_temperatures() -> None:
    head = draft_form("mixing").make(Material(model(), TargetEnds.of(target())), "published")
    with pytest.raises(InvalidParameter, match="learns at temperature 1"):
        head.training(**vars(batch()))


def test_layers_of_small_influence_go_and_the_ends_stay() -> None:
    influence = block_influence(target(), batch().ids)
    assert influence.shape == (3,) and float(influence.min()) >= 0
    assert kept_layers(torch.tensor([0.1, 0.2, 0.7, 0.3, 0.0]), 3) == [0, 2, 4]
    assert kept_layers(torch.tensor([0.1, 0.2]), 1) == [0]


def test_narrow_ends_are_the_nearest_of_their_rank() -> None:
    table = torch.randn(50, 6) @ torch.diag(torch.tensor([5.0, 4.0, 3.0, 0.1, 0.1, 0.1]))
    basis = principal(table, 3)
    assert basis.shape == (6, 3)
    assert float((table @ basis @ basis.mT - table).norm() / table.norm()) < 0.1
    assert torch.equal(principal(table, 6), torch.eye(6))
    assert [narrowed(one) for one in (32, 64, 100, 256, 576)] == [32, 64, 64, 128, 256]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("boost", r"boost:N or boost:N:samples, N from 2 to 8, not 'boost'"),
        ("boost:1", "not 'boost:1'"),
        ("boost:2:words", "not 'boost:2:words'"),
        ("smal", "did you mean small"),
    ],
)
def test_forms_that_are_not_there_are_refused_by_name(word: str, told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        draft_form(word)
    with pytest.raises(InvalidParameter, match="no draft model for --form tuned"):
        FORMS["tuned"].make(Material(model(), TargetEnds.of(target())), "jsd")
    with pytest.raises(InvalidParameter, match=r"form mixing learns by published.*not 'tvd'"):
        FORMS["mixing"].chosen_losses(("tvd",))
