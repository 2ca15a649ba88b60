"""SpecDec's drafter: an encoder-decoder that fills a block of masks behind the text, in which every token sees all."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import broken, step_of, tiny_model, tiny_tokenizer
from sources import encoder_decoder
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain, Widths, rows
from polydraft.conformance import check
from polydraft.drafters import DraftRequest, Session, SpecDrafter, drafter_of
from polydraft.drafters.parallel import SpecDraftState
from polydraft.errors import CheckpointError, InvalidParameter, UnpairedScheme, UnsupportedModel
from polydraft.models import Encoded, HuggingFaceModel
from polydraft.models.encoders.filling import filled
from polydraft.probs import Noise, SamplingParams, to_probs
from polydraft.reading import Text
from polydraft.schemes import IID, Given, WithoutReplacement
from polydraft.trees import Draft, TreePolicy, Verdict
from polydraft.verifiers import TopBeta, TopDown

KINDS = ("t5", "marian", "bart")
VOCAB, MASK, BLOCK = 64, 5, 4
PARAMS = SamplingParams(temperature=0.8)
TEXTS = [[3, 9, 4, 7, 11], [3], [3, 8], [3, 6, 6, 21, 8, 4, 4]]
SOURCES = [[7, 8, 9, 2], [7, 2], [50, 51, 2], [7, 8, 9, 2]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 14}


def module(kind: str = "t5", seed: int = 2, **changes: Any) -> PreTrainedModel:
    return encoder_decoder(kind, seed, **changes)


def drafter(kind: str = "t5", **changes: Any) -> SpecDrafter:
    return SpecDrafter(HuggingFaceModel(module(kind)), MASK, BLOCK, **{"shortlist_size": VOCAB, **changes})


def text_of(texts: Sequence[Sequence[int]]) -> Text:
    tokens = torch.zeros(len(texts), 64, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(text) for text in texts]))


def read_by(target: PreTrainedModel, source: Sequence[int]) -> Encoded:
    """Return what a target's decoder reads of a source, with what its encoder read."""
    ids = torch.tensor([list(source)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    encoder = target.get_encoder()
    return Encoded(encoder(**inputs)[0], inputs["attention_mask"], encoder, inputs)


def begun(own: SpecDrafter, text: Text, sources: Sequence[Sequence[int]]) -> SpecDraftState:
    target = encoder_decoder("t5" if own.model.model.config.model_type == "t5" else "bart")  # type: ignore[attr-defined]
    with torch.no_grad():
        read = [read_by(target, one) for one in sources]
    return own.start(text, Session(PARAMS, 64, VOCAB, sources=read))


def drafted(own: SpecDrafter, state: SpecDraftState, text: Text, policy: TreePolicy, seed: int = 3) -> Draft:
    asked = DraftRequest(text, WithoutReplacement(), policy, Noise.from_seed(seed, len(text.counts)))
    return own.draft(state, asked)[0]


@torch.no_grad()
def by_hand(model: PreTrainedModel, source: Sequence[int], text: Sequence[int], *, causal: bool = False) -> Tensor:
    """Return the laws of the slots: the model's own pass without a cache over source, text and masks."""
    size = len(text) + BLOCK
    seen = torch.zeros(size, size, dtype=torch.float64)
    if causal:
        seen.fill_(torch.finfo(torch.float64).min).triu_(1)
    ids = torch.tensor([list(source)])
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        decoder_input_ids=torch.tensor([[*text, *[MASK] * BLOCK]]),
        decoder_attention_mask=seen.view(1, 1, size, size),
        use_cache=False,
    ).logits[0, len(text) :]
    return to_probs(logits, PARAMS)


def check_rows(draft: Draft, texts: Sequence[Sequence[int]], sources: Sequence[Sequence[int]], own: SpecDrafter) -> int:
    inner = (draft.tree.children >= 0).any(-1) & draft.tree.valid
    model: PreTrainedModel = own.model.model  # type: ignore[attr-defined]
    for row, node in inner.nonzero().tolist():
        law = by_hand(model, sources[row], texts[row])[min(int(draft.tree.depth[row, node]), BLOCK - 1)]
        found = torch.zeros(VOCAB, dtype=torch.float64)
        found[draft.shortlist[row, node]] = draft.probs[row, node].double()
        assert torch.allclose(found, law, atol=1e-9)
    return int(inner.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_slots_written_by_hand(kind: str) -> None:
    """On three paths that share their beginnings, in a ragged batch, deeper than the block too."""
    own, text = drafter(kind), text_of(TEXTS)
    state = begun(own, text, SOURCES)
    assert check_rows(drafted(own, state, text, Widths((3, 2, 1))), TEXTS, SOURCES, own) == 10 * len(TEXTS)
    assert check_rows(drafted(own, state, text, Chain(6)), TEXTS, SOURCES, own) == 6 * len(TEXTS)
    once_more = drafted(own, state, text, Chain(6))
    assert check_rows(once_more, TEXTS, SOURCES, own) == 6 * len(TEXTS), (
        "the source's keys are kept, the text's are not"
    )


def test_what_a_row_depends_on() -> None:
    """Every token sees all, and a row is its source's: under a causal mask, or of another source, it is another."""
    model = module()
    law = by_hand(model, SOURCES[0], TEXTS[0])
    for other in (
        by_hand(model, SOURCES[0], TEXTS[0], causal=True),
        by_hand(model, SOURCES[1], TEXTS[0]),
        by_hand(model, SOURCES[0], TEXTS[3]),
    ):
        assert float((law - other).abs().max()) > 1e-3
    assert min(float((a - b).abs().max()) for a, b in pairwise(law)) > 1e-4, "no two slots are alike"


def test_rows_of_a_batch_are_those_of_texts_alone_and_may_be_moved() -> None:
    own, text = drafter(), text_of(TEXTS)
    state = begun(own, text, SOURCES)
    batched = drafted(own, state, text, Chain(4), seed=11)
    for row, prompt in enumerate(TEXTS):
        alone = text_of([prompt])
        noise = Noise((Noise.from_seed(11, len(TEXTS)).generators[row],))
        single = begun(own, alone, [SOURCES[row]])
        found, _ = own.draft(single, DraftRequest(alone, WithoutReplacement(), Chain(4), noise))
        assert torch.equal(found.tree.tokens[0], batched.tree.tokens[row])
        assert torch.allclose(found.probs[0], batched.probs[row], atol=1e-10)
        state = rows.put(state, len(TEXTS) - 1 - row, single)
    turned, sources = [*reversed(TEXTS)], [*reversed(SOURCES)]
    assert check_rows(drafted(own, state, text_of(turned), Chain(4)), turned, sources, own) == 4 * len(TEXTS)
    some = rows.select(rows.cut(state, 1, 1), range(1, 3))
    assert check_rows(drafted(own, some, text_of(turned[1:3]), Chain(2)), turned[1:3], sources[1:3], own) == 4


def test_a_step_leaves_nothing_but_longer_texts() -> None:
    own, texts = drafter(), [list(one) for one in TEXTS]
    text = text_of(texts)
    state = begun(own, text, SOURCES)
    for step, kept in enumerate([(0, 3, 1, 2), (3, 0, 0, 3)]):
        draft, state = own.draft(state, DraftRequest(text, IID(), Chain(3), Noise.from_seed(step, len(texts))))
        assert check_rows(draft, texts, SOURCES, own) == 3 * len(texts)
        paths = torch.full((len(texts), 3), -1)
        for row, count in enumerate(kept):
            paths[row, :count] = torch.arange(1, count + 1)
            texts[row] += [*draft.tree.tokens[row, 1 : count + 1].tolist(), 9 + step]
        verdict = Verdict(paths, torch.tensor(kept), torch.tensor([one[-1] for one in texts]))
        state = own.commit(state, step_of(text, draft, verdict))
        text = text_of(texts)


def test_a_text_longer_than_the_context_is_drafted_for_by_its_end() -> None:
    model = HuggingFaceModel(module("marian", max_position_embeddings=9))
    own, long = SpecDrafter(model, MASK, BLOCK), text_of([TEXTS[3]])
    with torch.no_grad():
        source = read_by(encoder_decoder("marian"), SOURCES[0])
    state = own.start(long, Session(PARAMS, 64, VOCAB, sources=[source]))
    draft = drafted(own, state, long, Chain(3))
    cut = drafted(own, state, text_of([TEXTS[3][-5:]]), Chain(3))
    assert bool(draft.tree.valid.all()) and torch.allclose(draft.probs, cut.probs, atol=1e-12)


def pair(kind: str = "t5") -> tuple[PreTrainedModel, SpecDrafter]:
    """Return a target and a drafter of its own weights, which without a causal mask is right some of the time."""
    target = encoder_decoder(kind)
    return target, SpecDrafter(HuggingFaceModel(target), MASK, BLOCK)


def inputs_of(sources: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(map(len, sources))
    ids = torch.tensor([[*one, *[0] * (width - len(one))] for one in sources])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in sources])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one != "t5")) for one in KINDS])
def test_greedy_texts_are_those_of_plain_decoding(kind: str) -> None:
    target, own = pair(kind)
    alone = [
        polydraft.generate(target, **inputs_of([one]), drafter="none", **GREEDY).sequences[0, 1:].tolist()
        for one in SOURCES
    ]
    found = polydraft.generate(target, **inputs_of(SOURCES), drafter=own, **GREEDY)
    assert found.sequences[:, 1:].tolist() == alone and found.statistics.drafted > 0
    assert not found.statistics.fallback
    if kind == "t5":
        assert found.statistics.accepted > 0
    prompts = [torch.tensor(one) for one in SOURCES]
    many = polydraft.generate_many(target, prompts, drafter=own, batch_size=2, **GREEDY)
    assert {text.name: text.tokens for text in many} == dict(enumerate(alone))


def test_a_model_without_laws_costs_drafts_alone() -> None:
    target, _ = pair()
    own = SpecDrafter(HuggingFaceModel(broken(target)), MASK, BLOCK)
    plain = polydraft.generate(target, **inputs_of(SOURCES), drafter="none", **GREEDY)
    with pytest.warns(RuntimeWarning, match="The spec-drafter drafter failed"):
        found = polydraft.generate(target, **inputs_of(SOURCES), drafter=own, **GREEDY)
    assert torch.equal(found.sequences, plain.sequences)


@pytest.mark.slow
def test_sampled_texts_have_the_targets_law() -> None:
    """A right engine fails with probability 1e-6."""
    sizes: dict[str, Any] = {"vocab_size": 5, "decoder_start_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
    target = encoder_decoder("t5", **sizes)
    own = SpecDrafter(HuggingFaceModel(module(**sizes)), 4, 2)
    ids = torch.tensor([[2, 3, 4, 2, 4]])

    def law(context: Sequence[int]) -> Sequence[float]:
        with torch.no_grad():
            logits = target(input_ids=ids, decoder_input_ids=torch.tensor([list(context)])).logits[0, -1]
        return logits.softmax(-1).tolist()

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        given = {"max_new_tokens": 3, "temperature": 1.0, "seed": seeds[0]}
        found = polydraft.generate(target, ids.expand(len(prompts), -1), drafter=own, policy=Chain(2), **given)
        return found.sequences[:, 1:].tolist()

    report = check(generate, law, [[1]], batch_size=32, most_samples=128)
    assert report.passed, str(report)


def test_the_papers_rule_takes_its_drafts_and_is_lossy() -> None:
    """It keeps likely drafts; at temperature 0 the target's likeliest token alone is one, and texts are its own."""
    target, own = pair()
    options: dict[str, Any] = {**inputs_of(SOURCES), "drafter": own, "verifier": TopDown(TopBeta(beta=5, tau=3.0))}
    strict = polydraft.generate(target, **options, **GREEDY)
    plain = polydraft.generate(target, **inputs_of(SOURCES), drafter="none", **GREEDY)
    assert torch.equal(strict.sequences, plain.sequences)
    warm: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "seed": 0, "max_new_tokens": 14}
    found = polydraft.generate(target, **options, **warm)
    exact = polydraft.generate(target, **{**options, "verifier": None}, **warm)
    assert found.statistics.accepted > exact.statistics.accepted
    assert not found.statistics.lossless and exact.statistics.lossless


def folder_of(folder: Path, told: object = None, *, kind: str = "t5", **changes: Any) -> Path:
    own = {"vocab_size": len(tiny_tokenizer()), **changes}
    model = tiny_model("llama", own["vocab_size"]) if kind == "llama" else encoder_decoder(kind, **own)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if told is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "spec_drafter": told}))
    return folder


@pytest.mark.parametrize("kind", ["t5", pytest.param("marian", marks=pytest.mark.slow)])
def test_a_folder_is_told_by_its_configuration(kind: str, tmp_path: Path) -> None:
    told = {"block_size": 3, "mask_token_id": 7}
    loaded = polydraft.load(folder_of(tmp_path / "target", kind=kind), folder_of(tmp_path / "draft", told, kind=kind))
    own = drafter_of(loaded.draft)
    assert isinstance(own, SpecDrafter) and (own.mask_id, own.block) == (7, 3)
    for given in (loaded.draft, str(tmp_path / "draft")):
        options: dict[str, Any] = {"drafter": given, "policy": Chain(3), "max_new_tokens": 6}
        found = polydraft.generate(loaded.target, **inputs_of(SOURCES[:1]), **options)
        assert "spec-drafter" in found.statistics.sources
    ordinary = polydraft.load(tmp_path / "target", folder_of(tmp_path / "plain", kind=kind))
    assert drafter_of(ordinary.draft).name == "model"


WRONG: dict[str, tuple[object, str]] = {
    "no table": (
        [3, 7],
        r"says that spec_drafter is \[3, 7\]; it must be a table of block_size and mask_token_id alone",
    ),
    "missing": ({"block_size": 3}, r"is {'block_size': 3}; it must be a table"),
    "left over": (
        {"block_size": 3, "mask_token_id": 7, "tau": 1},
        "it must be a table of block_size and mask_token_id",
    ),
    "no block": ({"block_size": 0, "mask_token_id": 7}, "says that block_size is 0; it must be a number"),
    "beyond": (
        {"block_size": 3, "mask_token_id": 101},
        "says that mask_token_id is 101; the model's embedding has 101",
    ),
    "an end": ({"block_size": 3, "mask_token_id": 2}, "says that mask_token_id is 2; that token ends a text"),
    "no number": (
        {"block_size": 3, "mask_token_id": "7"},
        "says that mask_token_id is '7'; it must be the number of a",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_tables_that_cannot_be_are_said_before_a_text(name: str, tmp_path: Path) -> None:
    told, message = WRONG[name]
    target = folder_of(tmp_path / "target")
    with pytest.raises(CheckpointError, match=rf"config\.json in '.*draft' .*{message}"):
        polydraft.load(target, folder_of(tmp_path / "draft", told))


def test_other_models_than_encoder_decoders_are_refused(tmp_path: Path) -> None:
    told = {"block_size": 3, "mask_token_id": 7}
    decoder = folder_of(tmp_path / "decoder", kind="llama")
    with pytest.raises(CheckpointError, match="has spec_drafter, but LlamaForCausalLM has no encoder"):
        polydraft.load(decoder, folder_of(tmp_path / "odd", told, kind="llama"))
    loaded = polydraft.load(decoder, folder_of(tmp_path / "draft", told))
    with pytest.raises(InvalidParameter, match="The draft model has an encoder, but the target has none"):
        polydraft.generate(loaded.target, torch.tensor([[3, 4]]), drafter=loaded.draft, max_new_tokens=4)


@pytest.mark.wrong_types
def test_wrong_values() -> None:
    model = HuggingFaceModel(module("marian"))
    with pytest.raises(InvalidParameter, match="SpecDec's drafter has an encoder, and LlamaForCausalLM has none"):
        SpecDrafter(tiny_model(), 3, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=r"The mask of MarianMTModel is token 64; .*must be below 64"):
        SpecDrafter(model, 64, 2)
    for block in (0, 128, True, 2.5):
        with pytest.raises(InvalidParameter, match="A spec-drafter's block has 1 to 127 masks"):
            SpecDrafter(model, MASK, block)  # type: ignore[arg-type]
    with pytest.raises(UnpairedScheme, match="SpecDec's drafter works with"):
        drafter().check(Given())
    with pytest.raises(UnsupportedModel, match="Own fills no masks; take an encoder-decoder of Hugging Face's"):
        filled(Own(), read_by(module(), SOURCES[0]), torch.tensor([[3]]), MASK, 2)  # type: ignore[arg-type]


class Own:
    """A model of another library."""
