"""PARD: all levels of a tree come out of one pass over the text and masks behind it, of which nothing is kept."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import TREE_KINDS, broken, passes_of, perturbed, step_of, tiny_model, tiny_tokenizer
from families import built
from heads import term_of_masks
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain, Widths, rows
from polydraft.conformance import check
from polydraft.drafters import DraftRequest, ParallelDrafter, Session, drafter_of
from polydraft.drafters.model import ModelDraftState
from polydraft.engine import load_models
from polydraft.errors import CheckpointError, InvalidParameter, UnpairedScheme, UnsupportedModel, VocabularyMismatch
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams, to_probs
from polydraft.reading import Text
from polydraft.schemes import IID, Given, TopK, WithoutReplacement
from polydraft.trees import BestFirst, Draft, Fixed, TreePolicy, TreeShape, Verdict

VOCAB, MASK = 24, 25
PARAMS = SamplingParams(temperature=0.8)
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8]]
SHAPE = Fixed(TreeShape(((3,), (2, 0, 1), (1, 2), (1, 0, 0))))
"""Four levels; paths share their beginnings."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20}


def draft_module(kind: str = "llama", **changes: Any) -> PreTrainedModel:
    """Return a draft model with two tokens more than the target has, the second of which is the mask."""
    return tiny_model(kind, VOCAB + 2, seed=4, **changes)


def drafter(kind: str = "llama", size: int | None = VOCAB) -> ParallelDrafter:
    return ParallelDrafter(HuggingFaceModel(draft_module(kind)), MASK, size)


def text_of(texts: Sequence[Sequence[int]]) -> Text:
    tokens = torch.zeros(len(texts), 64, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(text) for text in texts]))


def begun(own: ParallelDrafter, text: Text) -> ModelDraftState:
    return own.start(text, Session(PARAMS, 64, VOCAB))


def drafted(
    own: ParallelDrafter, state: ModelDraftState, text: Text, policy: TreePolicy = SHAPE, seed: int = 3
) -> tuple[Draft, ModelDraftState]:
    asked = DraftRequest(text, WithoutReplacement(), policy, Noise.from_seed(seed, len(text.counts)))
    return own.draft(state, asked)


def by_hand(model: PreTrainedModel, text: Sequence[int], slots: int) -> Tensor:
    """Return the laws of slots 1 to K."""
    return to_probs(slots_by_hand(model, text, slots), PARAMS)


@torch.no_grad()
def slots_by_hand(model: PreTrainedModel, text: Sequence[int], slots: int) -> Tensor:
    """Return the logits of slots 1 to K: a pass without a cache over text and K - 1 masks, under a written mask."""
    given = [*text, *[MASK] * (slots - 1)]
    size = len(given)
    hidden = torch.full((size, size), torch.finfo(torch.float64).min, dtype=torch.float64)
    for query in range(size):
        hidden[query, : query + 1] = 0
    return model(
        input_ids=torch.tensor([given]),
        attention_mask=hidden.view(1, 1, size, size),
        position_ids=torch.arange(size).unsqueeze(0),
        use_cache=False,
    ).logits[0, len(text) - 1 :, :VOCAB]


def check_rows(draft: Draft, texts: Sequence[Sequence[int]], model: PreTrainedModel) -> int:
    """Compare the rows of all nodes with children with the slots by hand; return how many there were."""
    inner = (draft.tree.children >= 0).any(-1) & draft.tree.valid
    depths = draft.tree.depth
    depth = int(depths[inner].max()) + 1
    for row, node in inner.nonzero().tolist():
        law = by_hand(model, texts[row], depth)[int(depths[row, node])]
        found = torch.zeros(VOCAB, dtype=torch.float64)
        found[draft.shortlist[row, node]] = draft.probs[row, node].double()
        assert torch.allclose(found, law, atol=1e-9)
    return int(inner.sum())


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_rows_are_slots_written_by_hand(kind: str) -> None:
    own, text = drafter(kind), text_of(ROWS)
    draft, _ = drafted(own, begun(own, text), text)
    assert check_rows(draft, ROWS, draft_module(kind)) == 6 * len(ROWS)
    slots = by_hand(draft_module(kind), ROWS[0], 4)
    assert min(float((a - b).abs().max()) for a, b in pairwise(slots)) > 1e-3, "no two are alike"


def test_rows_with_a_path_term_are_those_of_slot_and_token_by_hand() -> None:
    """Below the root alone: the row behind the text is the model's own."""
    term, text = term_of_masks(VOCAB + 2), text_of(ROWS)
    own = replace(drafter(), path=term)
    draft, _ = drafted(own, begun(own, text), text)
    inner = (draft.tree.children >= 0).any(-1) & draft.tree.valid
    for row, node in inner.nonzero().tolist():
        depth, token = int(draft.tree.depth[row, node]), int(draft.tree.tokens[row, node])
        logits = slots_by_hand(draft_module(), ROWS[row], 4)[depth]
        gained = (term.markov_w2.weight @ term.markov_w1.weight[token])[:VOCAB] if depth else 0
        found = torch.zeros(VOCAB, dtype=torch.float64)
        found[draft.shortlist[row, node]] = draft.probs[row, node].double()
        assert torch.allclose(found, to_probs(logits + gained, PARAMS), atol=1e-9)
    with pytest.raises(InvalidParameter, match="The path term knows 24 tokens and the draft model 26"):
        replace(drafter(), path=term_of_masks(VOCAB))


def test_what_lies_in_the_slots_and_how_many_there_are() -> None:
    """A mask is what is read there, once for each level but the first; further masks change no row before them."""
    own, text = drafter(), text_of(ROWS)
    with passes_of(own.model.model) as passes:  # type: ignore[attr-defined]
        four, _ = drafted(own, begun(own, text), text, Chain(4))
    assert passes == [(len(ROWS), max(map(len, ROWS)) + 3)]
    eight, _ = drafted(own, begun(own, text), text, Chain(8))
    one, _ = drafted(own, begun(own, text), text, Chain(1))
    for few in (four, one):
        levels = few.probs.shape[1] - 1
        assert torch.allclose(few.probs[:, :levels], eight.probs[:, :levels], atol=1e-12)
    other = ParallelDrafter(own.model, MASK - 1, VOCAB)
    found, _ = drafted(other, begun(other, text), text, Chain(4))
    assert torch.allclose(found.probs[:, 0], four.probs[:, 0], atol=1e-12), "the text's own row has no mask in it"
    assert not torch.allclose(found.probs[:, 1], four.probs[:, 1], atol=1e-3)


def test_masks_are_never_read_as_text() -> None:
    """Steps that keep none, some and all of a path, and one that drafts nothing: rows are those of a fresh state."""
    own, texts = drafter(), [list(row) for row in ROWS]
    text, model = text_of(texts), draft_module()
    state = own.read(begun(own, text), text, None)
    for step, kept in enumerate([(0, 4, 1, 2), (4, 0, 0, 4), None, (1, 2, 3, 0)]):
        if kept is None:
            draft, kept = Draft.nothing(text.last()), (0,) * len(texts)
        else:
            draft, state = drafted(own, state, text, Chain(4), step)
            assert check_rows(draft, texts, model) == 4 * len(texts)
            assert state.reader.read == text.counts
        paths = torch.full((len(texts), 4), -1)
        for row, count in enumerate(kept):
            paths[row, :count] = torch.arange(1, count + 1)
            texts[row] += [*draft.tree.tokens[row, 1 : count + 1].tolist(), (row + step) % VOCAB]
        verdict = Verdict(paths, torch.tensor(kept), torch.tensor([one[-1] for one in texts]))
        state = own.commit(state, step_of(text, draft, verdict))
        assert state.reader.read <= text.counts
        text = text_of(texts)
    draft, _ = drafted(own, state, text)
    assert check_rows(draft, texts, model) == 6 * len(texts)


def test_rows_of_a_batch_are_those_of_texts_alone_and_may_be_moved_and_rewound() -> None:
    own, text = drafter(), text_of(ROWS)
    batched, state = drafted(own, begun(own, text), text, seed=11)
    for row, prompt in enumerate(ROWS):
        alone = text_of([prompt])
        noise = Noise((Noise.from_seed(11, len(ROWS)).generators[row],))
        found, single = own.draft(begun(own, alone), DraftRequest(alone, WithoutReplacement(), SHAPE, noise))
        assert torch.equal(found.tree.tokens[0], batched.tree.tokens[row])
        assert torch.allclose(found.probs[0], batched.probs[row], atol=1e-10)
        state = rows.put(state, len(ROWS) - 1 - row, single)
    turned = [list(row) for row in reversed(ROWS)]
    draft, _ = drafted(own, state, text_of(turned))
    assert check_rows(draft, turned, draft_module()) == 6 * len(ROWS)
    state = rows.cut(state, 3, 3)
    turned[3] = [*turned[3][:3], 11, 12]
    draft, _ = drafted(own, state, text_of(turned))
    assert check_rows(draft, turned, draft_module()) == 6 * len(ROWS)


def near(scale: float = 0.05, path: bool = False) -> tuple[PreTrainedModel, ParallelDrafter]:
    """Return a target and a drafter that is right some of the time, at least where it reads no mask."""
    target = tiny_model(vocab=VOCAB)
    term = term_of_masks(VOCAB) if path else None
    return target, ParallelDrafter(HuggingFaceModel(perturbed(target, scale)), VOCAB - 1, path=term)


POLICIES: dict[str, TreePolicy | None] = {"default": None, "chain": Chain(4), "widths": Widths((3, 2, 1))}


@pytest.mark.long(2)
@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_texts_are_those_of_plain_decoding(policy: str, path: bool) -> None:
    """Alone, in a ragged batch, in a running batch whose prompts are read in chunks."""
    target, own = near(path=path)
    options: dict[str, Any] = {**GREEDY, "eos_token_id": None}
    prompts = [torch.tensor(row) for row in ROWS]
    plain = [polydraft.generate(target, one[None], drafter="none", **options).sequences[0] for one in prompts]
    chosen = {} if POLICIES[policy] is None else {"policy": POLICIES[policy]}
    for one, expected in zip(prompts, plain, strict=True):
        found = polydraft.generate(target, one[None], drafter=own, **chosen, **options)
        assert torch.equal(found.sequences[0], expected) and found.statistics.accepted > 0
    many = polydraft.generate_many(target, prompts, drafter=own, batch_size=2, **chosen, **options)
    assert {text.name: text.tokens for text in many} == {
        name: text[len(ROWS[name]) :].tolist() for name, text in enumerate(plain)
    }


def test_a_model_without_laws_costs_drafts_alone() -> None:
    target, _ = near()
    own = ParallelDrafter(HuggingFaceModel(broken(target)), VOCAB - 1)
    plain = polydraft.generate(target, torch.tensor([ROWS[0]]), drafter="none", **GREEDY)
    with pytest.warns(RuntimeWarning, match="The pard drafter failed"):
        found = polydraft.generate(target, torch.tensor([ROWS[0]]), drafter=own, **GREEDY)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.fallback


def test_sampled_texts_have_the_targets_law() -> None:
    """A right engine fails with probability 1e-6; texts take several steps, so that masks left in a cache were read."""
    target = tiny_model(vocab=4)
    own = ParallelDrafter(HuggingFaceModel(perturbed(target, 0.2)), 3)

    def law(context: Sequence[int]) -> Sequence[float]:
        with torch.no_grad():
            return target(input_ids=torch.tensor([list(context)])).logits[0, -1].softmax(-1).tolist()

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        ids, given = torch.tensor(prompts), {"max_new_tokens": 4, "temperature": 1.0, "top_k": 0, "eos_token_id": None}
        found = polydraft.generate(target, ids, drafter=own, policy=Widths((2, 1)), seed=seeds[0], **given)
        return found.sequences[:, ids.shape[1] :].tolist()

    report = check(generate, law, [[1, 2]], batch_size=64, most_samples=512)
    assert report.passed, str(report)


def folder_of(folder: Path, *, vocab: int = len(tiny_tokenizer()) + 1, kind: str = "llama", **told: Any) -> Path:
    model = tiny_model(kind, vocab, dtype=torch.float32)
    model.config.update(told)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_is_told_by_its_configuration(tmp_path: Path) -> None:
    mask = len(tiny_tokenizer())
    target = folder_of(tmp_path / "target", vocab=mask)
    forms = {
        "published": {"pard_token": mask, "spd_type": "pard"},
        "token alone": {"pard_token": mask},
        "kind alone": {"spd_type": "pard", "ptd_token_id": mask},
        "another key first": {"spd_type": "pard", "pard_token": 3, "mask_token_id": mask},
    }
    for name, told in forms.items():
        pair = polydraft.load(target, folder_of(tmp_path / name, **told))
        own = drafter_of(pair.draft)
        assert (type(own), getattr(own, "mask_id", None)) == (ParallelDrafter, mask), name
    prompt = torch.tensor([[3, 1, 4]])
    for given in (pair.draft, str(tmp_path / "published")):
        found = polydraft.generate(pair.target, prompt, drafter=given, policy=Chain(3), max_new_tokens=8)
        assert "pard" in found.statistics.sources
    for name, told in {"plain": {}, "another kind": {"spd_type": "eagle"}}.items():
        ordinary = polydraft.load(target, folder_of(tmp_path / name, **told)).draft
        assert drafter_of(ordinary).name == "model", name
    with pytest.raises(InvalidParameter, match="takes a pass for each level, and this LlamaForCausalLM was trained to"):
        polydraft.tune(load_models(target, tmp_path / "published"), [prompt], temperatures=[0.0])


KEYS = "mask_token_id, dspark_noise_token_id, pard_token, ptd_token_id"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"spd_type": "pard"}, f"spd_type is 'pard', and names no mask token; it must have one of {KEYS}"),
    "none taken": ({"pard_token": -1}, "says that pard_token is -1; the model's embedding has 101 rows"),
    "beyond": (
        {"pard_token": 101},
        "says that pard_token is 101; the model's embedding has 101 rows, so it must be be",
    ),
    "no number": ({"pard_token": "100"}, "says that pard_token is '100'; it must be the number of a token"),
    "an end": ({"pard_token": 7, "eos_token_id": [5, 7]}, "says that pard_token is 7; that token ends a text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_masks_that_cannot_be_are_said_before_a_text(name: str, tmp_path: Path) -> None:
    told, message = WRONG[name]
    folder, target = folder_of(tmp_path / "draft", vocab=101, **told), folder_of(tmp_path / "target")
    with pytest.raises(CheckpointError, match=r"config\.json in '.*draft' ") as error:
        polydraft.load(target, folder)
    assert message in str(error.value)


def test_wrong_values() -> None:
    model = HuggingFaceModel(draft_module())
    for mask, why in ((VOCAB + 2, "must be below 26"), (True, "the number of a token"), (-1, "must be below 26")):
        with pytest.raises(InvalidParameter, match=f"The mask of LlamaForCausalLM is token {mask}; .*{why}"):
            ParallelDrafter(model, mask)
    with pytest.raises(InvalidParameter, match="shortlist_size must be at least 1"):
        ParallelDrafter(model, MASK, 0)
    with pytest.raises(UnsupportedModel, match="Lfm2ForCausalLM cannot take back what it has read"):
        ParallelDrafter(HuggingFaceModel(built("lfm2", {"layer_types": ["conv", "full_attention"] * 2})), 3)
    with pytest.raises(UnpairedScheme, match="A draft model that fills masks works with"):
        drafter().check(Given())
    wide = ParallelDrafter(HuggingFaceModel(tiny_model(vocab=VOCAB + 1025)), MASK)
    with pytest.raises(VocabularyMismatch, match="The target has 24 tokens and the draft model 1049"):
        begun(wide, text_of(ROWS))


def test_what_suits_it_is_as_deep_as_it_is_trained() -> None:
    own = drafter()
    assert own.defaults(SamplingParams(temperature=0.0)).policy == BestFirst(8)
    warm = own.defaults(SamplingParams())
    assert (warm.scheme, warm.policy) == (IID(), Chain(8)) and own.needs.passes == 1
    own.check(TopK())
