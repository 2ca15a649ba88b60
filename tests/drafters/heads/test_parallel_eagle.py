"""P-EAGLE: its rows by hand, texts, folders of three makers, what these may lack, and what it learns."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from doubles import tiny_model
from heads import eagle_drafter
from test_eagle import (
    ANATOMY,
    PROMPTS,
    TOKENS,
    VOCAB,
    begun,
    by_hand,
    fused_by_hand,
    randomly,
    rows_below,
    states_of,
    stepped,
    text_of,
)
from test_eagle_folders import LAYER, LLAMA, PAIRS, SPECULATORS, THIRD, put, tensors_of, under, vocabulary
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import BestFirst, Chain, Widths
from polydraft.drafters import load_head
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.eagle_head import Eagle3Norms
from polydraft.drafters.heads.formats.eagle_folders import write_eagle
from polydraft.drafters.heads.parallel_eagle import ParallelEagle
from polydraft.errors import CheckpointError, InvalidParameter, VocabularyMismatch
from polydraft.models import HuggingFaceModel
from polydraft.rows import cut
from polydraft.rows import put as put_row
from polydraft.trees import Frontier, TreePolicy

WIDTH, MASK, DRAFTS = 16, 13, 4
VARIANTS = {
    "one layer": {"norms": Eagle3Norms()},
    "two layers": {"norms": Eagle3Norms(residual=True), "layers": 2},
    "joined": {"norms": Eagle3Norms(joined=True, output=True), "layers": 2},
    "sources": {"norms": Eagle3Norms(sources=True)},
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


def head_of(name: str) -> ParallelEagle:
    head = ParallelEagle(ANATOMY, (2, 1, 0), WIDTH, mask_id=MASK, drafts=DRAFTS, **VARIANTS[name])
    randomly(head)
    return head.double().eval()


def drafter_of(name: str, tokens: Tensor | None = TOKENS) -> HeadDrafter[ParallelEagle]:
    rows = torch.nn.Linear(WIDTH, VOCAB if tokens is None else len(tokens), bias=False)
    randomly(rows, 1, 0.8)
    return HeadDrafter(head_of(name), HeadEnds(lm_head=rows.double(), tokens=tokens))


def slot_rows(target: PreTrainedModel, drafter: HeadDrafter[Any], text: Sequence[int], swap: str = "") -> Tensor:
    """Return the logits of all depths behind a text: its pairs, then slots of the mask beside the learnt feature.

    Args:
        swap: what is done otherwise than the authors do.
    """
    head, model, rows = drafter.network, cast(Any, target), cast(Any, drafter.ends.lm_head)
    table = model.get_input_embeddings().weight.double()
    feature = head.mask_hidden.unsqueeze(0)
    slot = feature @ head.fc.weight.T if swap == "no norm" else fused_by_hand(head, feature)
    hidden = torch.cat([fused_by_hand(head, states_of(target, head, text).double())[:-1], slot.expand(DRAFTS - 1, -1)])
    tokens = [*text[1:], *[text[-1] if swap == "last token" else MASK] * (DRAFTS - 1)]
    count, roots = len(tokens), len(text) - 2
    places = torch.arange(count)
    places = places.clamp_max(roots) if swap == "no positions" else places
    sees = torch.ones(count, count, dtype=torch.bool).tril()
    sees[roots:, roots:] |= swap == "both ways"
    if swap == "blind slots":
        sees[roots + 1 :, roots + 1 :] = torch.eye(DRAFTS - 1, dtype=torch.bool)
    _, output = by_hand(head, table[tokens], hidden, places, sees)
    return output[-DRAFTS:] @ rows.weight.T


def logits_below(drafter: HeadDrafter[Any], state: Any, rows: list[list[int]], path: list[int]) -> Tensor:
    """Return the logits along a path below every text: "b depth v"."""
    grown, _ = drafter.network.root(state.memory, text_of(rows), state.ends)
    found = list[Tensor]()
    for depth in range(len(path) + 1):
        tokens = torch.tensor([[row[-1] if not depth else path[depth - 1]] for row in rows])
        frontier = Frontier(range(depth, depth + 1), tokens, depth, torch.ones(len(rows), 1, depth + 1).bool())
        found.append(grown.logits(frontier))
    return torch.cat(found, 1)


PATHS = [[5, 7, 2], [5, 7, 9], [5, 1, 2]]


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_rows_are_those_of_the_formulas_whatever_the_path(name: str, target: PreTrainedModel) -> None:
    drafter, rows = drafter_of(name), [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8, 8]]
    state, _ = begun(drafter, target, rows)
    for path in PATHS:
        found = logits_below(drafter, state, rows, path)
        for row, text in enumerate(rows):
            wanted = slot_rows(target, drafter, text)
            torch.testing.assert_close(found[row], wanted, atol=1e-6, rtol=0)  # angles have single precision


@pytest.mark.parametrize("swap", ["no norm", "last token", "no positions", "both ways", "blind slots"])
@torch.no_grad()
def test_a_detail_done_otherwise_gives_other_rows(swap: str, target: PreTrainedModel) -> None:
    drafter = drafter_of("joined")
    state, _ = begun(drafter, target, PROMPTS[:1])
    found = logits_below(drafter, state, PROMPTS[:1], PATHS[0])
    assert (found[0] - slot_rows(target, drafter, PROMPTS[0], swap)).abs().amax() > 1e-3


@torch.no_grad()
def test_nodes_below_the_slots_take_the_last_ones_row(target: PreTrainedModel) -> None:
    drafter = drafter_of("one layer")
    state, _ = begun(drafter, target, PROMPTS)
    found = logits_below(drafter, state, PROMPTS, [5, 7, 2, 1, 0, 4])
    assert torch.equal(found[:, 4:], found[:, 3:4].expand(-1, 3, -1)) and not torch.equal(found[:, 2], found[:, 3])


@pytest.mark.parametrize("at_once", [512, 2, 5])
def test_prompts_in_chunks_are_prompts(at_once: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, drafts = drafter_of("two layers"), [[5, 7, 1]] * 3
    whole = rows_below(drafter, begun(drafter, target, PROMPTS)[0], text_of(PROMPTS), drafts)
    monkeypatch.setattr("polydraft.drafters.heads.eagle_head.AT_ONCE", at_once)
    for chunk in (None, 1, 4):
        state, _ = begun(drafter, target, PROMPTS, chunk)
        torch.testing.assert_close(rows_below(drafter, state, text_of(PROMPTS), drafts), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("policy", [Widths((3, 2, 1)), BestFirst(9), Chain(6)], ids=repr)
def test_slots_leave_nothing_behind(policy: TreePolicy, target: PreTrainedModel) -> None:
    """After steps, a cut and a newcomer, rows are those of a fresh start."""
    drafter, rows = drafter_of("two layers"), [list(row) for row in PROMPTS]
    state, drafts = stepped(drafter, target, rows, policy, 4), [[5, 7, 1]] * 3
    assert all(0 < done < len(row) for done, row in zip(state.memory.done, rows, strict=True))
    fresh = rows_below(drafter, begun(drafter, target, rows)[0], text_of(rows), drafts)
    torch.testing.assert_close(rows_below(drafter, state, text_of(rows), drafts), fresh, atol=1e-5, rtol=0)
    newcomer = [8, 8, 2, 0, 6]
    state, rows[1] = put_row(cut(state, 1, 0), 1, begun(drafter, target, [newcomer])[0]), newcomer
    known, _ = begun(drafter, target, rows)
    found = rows_below(drafter, state, text_of(rows), drafts)
    torch.testing.assert_close(found, rows_below(drafter, known, text_of(rows), drafts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", [Widths((3, 2, 1)), BestFirst(12), Chain(6)], ids=repr)
def test_greedy_text_is_the_models(policy: TreePolicy, target: PreTrainedModel) -> None:
    drafter = drafter_of("two layers")
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    plain: list[Any] = [polydraft.generate(target, [row], drafter="none", **options) for row in PROMPTS]
    alone = [one.sequences[0].tolist() for one in plain]
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS])
    given: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "drafter": drafter, "policy": policy, **options}
    found: Any = polydraft.generate(target, ids, **given)
    assert not found.statistics.fallback and found.statistics.drafted > 0
    for row, prompt in enumerate(PROMPTS):
        assert found.sequences[row, width - len(prompt) :].tolist() == alone[row]
    many = polydraft.generate_many(target, [*PROMPTS, PROMPTS[0][:5]], batch_size=2, drafter=drafter, **options)
    texts = {one.name: one.tokens for one in many}
    assert [texts[row] for row in range(3)] == [one[len(PROMPTS[row]) :] for row, one in enumerate(alone)]


def test_a_sampled_row_is_what_it_is_alone(target: PreTrainedModel) -> None:
    drafter = drafter_of("two layers")
    heat: dict[str, Any] = {"drafter": drafter, "temperature": 1.0, "seed": 3, "max_new_tokens": 14}
    ids = torch.tensor([PROMPTS[0][:3], PROMPTS[1]])
    together: Any = polydraft.generate(target, ids, **heat)
    alone: Any = polydraft.generate(target, [PROMPTS[0][:3]], **heat)
    assert together.sequences[0].tolist() == alone.sequences[0].tolist()


# Folders.

FEATURE = torch.randn(48, generator=torch.Generator().manual_seed(9))
SECOND = {**LAYER, "input_layernorm.weight": (16,)}
LAYERS = {**THIRD, **under("layers.0.", PAIRS), **under("layers.1.", SECOND), "embed_tokens.weight": (VOCAB, 16)}
TWO = {**LLAMA, "num_hidden_layers": 2}
CLASS = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}


def tensors(shapes: dict[str, tuple[int, ...]], *axes: int) -> dict[str, Tensor]:
    return {**tensors_of(shapes), **vocabulary(), "mask_hidden": FEATURE.reshape(*axes, -1)}


FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "speculators": (
        {
            **SPECULATORS,
            "speculators_model_type": "peagle",
            "architectures": ["PEagleSpeculator"],
            "transformer_layer_config": TWO,
            "mask_token_id": MASK,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]},
        },
        tensors(LAYERS, 1, 1),
    ),
    "specforge": (
        {**TWO, "architectures": ["PEagleDraftModel"], "draft_vocab_size": 14, "mask_token_id": MASK},
        tensors(LAYERS, 1, 1),
    ),
    "vllm": (
        {**CLASS, "draft_vocab_size": 14, "ptd_token_id": MASK, "para_depths": 5},
        tensors({**THIRD, **under("midlayer.", PAIRS), "embed_tokens.weight": (VOCAB, 16)}, 1),
    ),
    "vllm, the mask as in block heads": (
        {**CLASS, "dflash_config": {"mask_token_id": MASK}, "pard_token": 3},
        tensors({**THIRD, **under("midlayer.", PAIRS)}, 1),
    ),
    "untold": ({**LLAMA, "pard_token": MASK}, tensors({**THIRD, **under("midlayer.", PAIRS)})),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_told_and_read(name: str, tmp_path: Path) -> None:
    drafter: Any = load_head(put(tmp_path / "head", *FOLDERS[name]), 6)
    head = drafter.network
    assert type(head) is ParallelEagle and head.mask_id == MASK and torch.equal(head.mask_hidden, FEATURE)
    assert head.drafts == (5 if name in ("speculators", "vllm") else 8)
    assert head.depth == (2 if name in ("speculators", "specforge") else 1)
    assert torch.equal(drafter.ends.tokens, TOKENS)


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_written_as_they_are_read(
    name: str, speculators: bool, tmp_path: Path, target: PreTrainedModel
) -> None:
    drafter: Any = load_head(put(tmp_path / "head", *FOLDERS[name]), 6)
    model = HuggingFaceModel(target)
    write_eagle(drafter, tmp_path / "new", model, speculators=speculators, dtype=torch.float32)
    again: Any = load_head(tmp_path / "new", None)
    assert again.needs == drafter.needs and again.network.anatomy == drafter.network.anatomy
    assert (again.network.mask_id, again.network.drafts) == (MASK, drafter.network.drafts)
    for one, other in ((drafter.network, again.network), (drafter.ends, again.ends)):
        assert one.state_dict().keys() == other.state_dict().keys()
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_mask_that_is_told_in_python_counts_whatever_the_folder_says(name: str, tmp_path: Path) -> None:
    config, held = FOLDERS[name]
    unnamed = {key: value for key, value in config.items() if not key.endswith(("_token_id", "pard_token", "_config"))}
    for place, said in (("named", config), ("unnamed", config if name == "speculators" else unnamed)):
        found: Any = load_head(put(tmp_path / place, said, held), 6, mask_token_id=MASK - 1)
        assert found.network.mask_id == MASK - 1
    with pytest.raises(CheckpointError, match="mask_token_id is 24; there are 24 tokens"):
        load_head(tmp_path / "named", 6, mask_token_id=VOCAB)


def test_only_heads_with_masks_are_told_which(tmp_path: Path) -> None:
    write_eagle(eagle_drafter(), tmp_path, HuggingFaceModel(tiny_model(vocab=VOCAB)), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="holds a EAGLE head, and only P-EAGLE's and blocks have masks"):
        load_head(tmp_path, mask_token_id=MASK)


NO_MASK = "names no mask token by dflash_config.mask_token_id, mask_token_id, dspark_noise_token_id, pard_token or ptd"
DAMAGED: list[tuple[str, Any, str]] = [
    ("specforge", lambda c, t: c.pop("mask_token_id"), NO_MASK),
    ("vllm", lambda c, t: c.pop("ptd_token_id"), "write the one that the head was trained with"),
    ("speculators", lambda c, t: t.pop("mask_hidden"), "is not complete: mask_hidden is missing"),
    ("specforge", lambda c, t: t.pop("mask_hidden"), "is not complete: mask_hidden is missing"),
    ("vllm", lambda c, t: c.update(ptd_token_id=VOCAB), "ptd_token_id is 24; there are 24 tokens"),
    ("vllm", lambda c, t: c.update(ptd_token_id="<mask>"), "ptd_token_id is '<mask>'; it must be a number"),
    ("vllm", lambda c, t: c.update(eos_token_id=[2, MASK]), r"ptd_token_id is 13; that token ends texts"),
    ("speculators", lambda c, t: c.update(eos_token_id=MASK), "mask_token_id is 13; that token ends texts"),
    ("vllm", lambda c, t: t.update(mask_hidden=torch.ones(1, 16)), r"mask_hidden has shape \[1, 16\].* are 48 wide"),
    ("vllm", lambda c, t: t.update(mask_hidden=torch.ones(3, 16)), r"mask_hidden has shape \[3, 16\].* are 48 wide"),
    ("vllm", lambda c, t: t["mask_hidden"].fill_(float("nan")), "mask_hidden holds values that are no numbers"),
    ("vllm", lambda c, t: c.update(para_depths=0), "para_depths is 0; it must be a number"),
    ("speculators", lambda c, t: t.update(extra=torch.ones(1)), "holds extra, which this kind of head does not have"),
    ("speculators", lambda c, t: t.pop("layers.1.mlp.up_proj.weight"), r"layers.0.mlp.up_proj.weight is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGED, ids=[one[2] for one in DAMAGED])
def test_what_is_wrong_with_a_folder_is_said(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    config, held = copy.deepcopy(FOLDERS[name])
    damage(config, held)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head(put(tmp_path / "head", config, held), 6)
    assert str(caught.value).count(". ") == 0


def test_a_mask_without_an_embedding_is_refused(target: PreTrainedModel) -> None:
    drafter = drafter_of("one layer")
    drafter.network.mask_id = VOCAB
    with pytest.raises(VocabularyMismatch, match="mask is token 24 and there are embeddings of 24 tokens"):
        begun(drafter, target, PROMPTS)
    with pytest.raises(InvalidParameter, match="drafts a token or more and has a mask, not 0 and 1"):
        ParallelEagle(ANATOMY, (1,), WIDTH, Eagle3Norms(), 1, drafts=0)


@pytest.mark.parametrize(("slots", "chain", "new"), [(16, 3, 6), (8, 1, 1), (64, 2, 3)])
def test_slots_may_lie_beyond_the_room_for_a_text(slots: int, chain: int, new: int) -> None:
    """They need no states of the target, and no text and no tree comes as far."""
    network = ParallelEagle(ANATOMY, (2, 1, 0), WIDTH, Eagle3Norms(), 1, 1, slots).double().eval()
    model, options = tiny_model(vocab=VOCAB), {"max_new_tokens": new, "temperature": 0.0, "eos_token_id": None}
    plain = polydraft.generate(model, [[3, 1, 4]], drafter="none", **options)
    found = polydraft.generate(model, [[3, 1, 4]], drafter=HeadDrafter(network, HeadEnds()), policy=chain, **options)
    assert found.sequences.equal(plain.sequences) and not found.statistics.fallback
