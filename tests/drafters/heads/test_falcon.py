"""Falcon: rows of trees by hand, texts, folders, and what these may lack."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from doubles import tiny_model
from heads import falcon_drafter
from safetensors.torch import load_file, save_file
from test_eagle import ANATOMY, PROMPTS, VOCAB, begun, part, plain_layer, randomly, rows_below, stepped, text_of
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import BestFirst, Chain, Widths
from polydraft.drafters import load_head, write_falcon
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.falcon import FalconHead
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.rows import cut
from polydraft.rows import put as put_row
from polydraft.trees import Frontier, TreePolicy

WIDTH = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    "two layers": {"layers": 2},
    "recurrent": {"recurs": True},
    "blocks of three": {"block": 3, "layers": 2, "recurs": True, "bias": False},
    "blocks of one": {"block": 1},
}
PATHS = [(5, 7, 2, 4, 1), (5, 7, 2, 9, 1), (5, 1, 2, 4, 1)]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


def drafter_of(name: str) -> HeadDrafter[FalconHead]:
    head = FalconHead(ANATOMY, **VARIANTS[name])
    randomly(head)
    return HeadDrafter(head.double().eval(), HeadEnds())


def gates(head: Any, pairs: Tensor, fresh: Sequence[bool]) -> Tensor:
    """Return what the two layers of the LSTM make of a path's pairs, by its formulas."""
    own = dict(head.lstm.named_parameters())
    for layer in range(2):
        found, h, c = list[Tensor](), torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double()
        for pair, anew in zip(pairs, fresh, strict=True):
            h, c = (torch.zeros_like(h), torch.zeros_like(c)) if anew else (h, c)
            both = own[f"weight_ih_l{layer}"] @ pair + own[f"weight_hh_l{layer}"] @ h
            both = both + own.get(f"bias_ih_l{layer}", 0) + own.get(f"bias_hh_l{layer}", 0)
            i, f, g, o = both.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        pairs = torch.stack(found)
    return pairs


def path_rows(target: PreTrainedModel, drafter: Any, text: list[int], path: Sequence[int], swap: str = "") -> Tensor:
    """Return the logits behind a path's last token: all pairs of the text and of the path's whole blocks at once.

    Args:
        swap: what is done otherwise.
    """
    head, model, k = drafter.network, cast(Any, target), drafter.network.block
    table, rows = (one.weight.double() for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0].double()
    first = min(1, len(text) - k)  # the slot of the first pair: texts without a block have pairs of zeros before
    assert first >= 0
    tokens, hidden = text[first:], torch.cat([torch.zeros(1 - first, WIDTH).double(), states[:-1]])
    slots = [*range(first, len(text))]
    made = torch.zeros(0)
    for block in range(len(path) // k + 1):
        if block:
            tokens = [*tokens, *path[(block - 1) * k : block * k]]
            slots = [*slots, *range(slots[-1] + 1, slots[-1] + 1 + k)]
            hidden = torch.cat([hidden, made])
        count, order = len(tokens), torch.arange(len(tokens))
        context = len(text) - first - k
        limits = torch.where(order < context, order, context + (order - context) // k * k + k - 1)
        limits = order if swap == "causal" else limits
        pairs = torch.cat([table[tokens], hidden], -1)
        pairs = torch.cat([hidden, table[tokens]], -1) if swap == "feature first" else pairs
        recurs = head.recurs != (swap == "other recurrence")
        x = gates(head, pairs, [not recurs or slot <= 1 for slot in slots])
        for layer in range(head.depth):
            sees = order <= limits.unsqueeze(-1)
            x = plain_layer(x, part(dict(head.named_parameters()), f"layers.{layer}."), torch.tensor(slots) - 1, sees)
        made = x[count - k :]
    place = len(path) % k
    return made[k - 1 - place if swap == "last first" else place] @ rows.T


def tree_logits(
    drafter: Any, state: Any, rows: list[list[int]], paths: Sequence[tuple[int, ...]] = PATHS
) -> dict[tuple[int, ...], Tensor]:
    """Return the logits of every node of the tree of all paths, by its path: "b v"."""
    grown, _ = drafter.network.root(state.memory, text_of(rows), state.ends)
    found, nodes = dict[tuple[int, ...], Tensor](), list[tuple[int, ...]]()
    for depth in range(len(paths[0]) + 1):
        now = [*dict.fromkeys(path[:depth] for path in paths)]
        start, nodes = len(nodes), [*nodes, *now]
        ids = [[path[-1] if path else row[-1] for path in now] for row in rows]
        above = torch.tensor([[path[: len(one)] == one for one in nodes] for path in now])
        frontier = Frontier(range(start, len(nodes)), torch.tensor(ids), depth, above.expand(len(rows), -1, -1))
        found |= dict(zip(now, grown.logits(frontier).unbind(1), strict=True))
    return found


def check_chunks(
    drafter: Any, target: Any, rows: list[list[int]], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read prompts whole and in chunks, with few tokens at once, and require the same rows."""
    drafts = [[5, 7, 1]] * len(rows)
    whole = rows_below(drafter, begun(drafter, target, rows)[0], text_of(rows), drafts)
    monkeypatch.setattr("polydraft.drafters.heads.eagle_head.AT_ONCE", at_once)
    for chunk in (None, 1, 4):
        state, _ = begun(drafter, target, rows, chunk)
        torch.testing.assert_close(rows_below(drafter, state, text_of(rows), drafts), whole, atol=1e-6, rtol=0)


def check_steps(drafter: Any, target: Any, policy: TreePolicy) -> None:
    """Take steps, let a text take the place of another, and require the rows of a fresh start."""
    rows = [list(row) for row in PROMPTS]
    state, drafts = stepped(drafter, target, rows, policy, 4), [[5, 7, 1]] * 3
    fresh = rows_below(drafter, begun(drafter, target, rows)[0], text_of(rows), drafts)
    torch.testing.assert_close(rows_below(drafter, state, text_of(rows), drafts), fresh, atol=1e-5, rtol=0)
    newcomer = [8, 8, 2, 0, 6]
    state, rows[1] = put_row(cut(state, 1, 0), 1, begun(drafter, target, [newcomer])[0]), newcomer
    fresh = rows_below(drafter, begun(drafter, target, rows)[0], text_of(rows), drafts)
    torch.testing.assert_close(rows_below(drafter, state, text_of(rows), drafts), fresh, atol=1e-5, rtol=0)


def check_greedy(drafter: Any, target: Any, policy: TreePolicy | None) -> None:
    """Require plain decoding's greedy text in a ragged batch, alone and in a running batch, and a seed's alone."""
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
        own: Any = polydraft.generate(target, [prompt], drafter=drafter, policy=policy, **options)
        assert own.sequences[0].tolist() == alone[row]
    many = polydraft.generate_many(target, [*PROMPTS, PROMPTS[0][:5]], batch_size=2, drafter=drafter, **options)
    texts = {one.name: one.tokens for one in many}
    assert [texts[row] for row in range(3)] == [one[len(PROMPTS[row]) :] for row, one in enumerate(alone)]
    heat: dict[str, Any] = {"drafter": drafter, "policy": policy, "temperature": 1.0, "seed": 3, "max_new_tokens": 9}
    together: Any = polydraft.generate(target, torch.tensor([PROMPTS[0][:3], PROMPTS[1]]), **heat)
    single: Any = polydraft.generate(target, [PROMPTS[0][:3]], **heat)
    assert together.sequences[0].tolist() == single.sequences[0].tolist()


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_rows_of_trees_are_those_of_the_formulas(name: str, target: PreTrainedModel) -> None:
    drafter, rows = drafter_of(name), [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8, 8, 4, 0]]
    rows = [*rows, [8, 8]] if drafter.network.block == 2 else rows
    state, _ = begun(drafter, target, rows)
    found = tree_logits(drafter, state, rows)
    assert len(found) == 12
    for path, logits in found.items():
        for row, text in enumerate(rows):
            wanted = path_rows(target, drafter, text, path)
            torch.testing.assert_close(logits[row].double(), wanted, atol=1e-6, rtol=0)  # angles in single precision


@pytest.mark.parametrize("name", ["published", "recurrent", "blocks of three"])
@torch.no_grad()
def test_the_gates_are_those_of_torchs_lstm(name: str) -> None:
    """The authors' module, given texts on the axis of the batch: so pairs begin with zeros unless the head recurs."""
    head = drafter_of(name).network
    pairs = torch.randn(3, 7, 2 * WIDTH, generator=torch.Generator().manual_seed(2)).double()
    found, _ = head.gated(pairs, pairs.new_zeros(3, head.carries))
    wanted = [head.lstm(one.unsqueeze(1 if head.recurs else 0))[0].view(7, WIDTH) for one in pairs]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-12, rtol=0)


@pytest.mark.parametrize("swap", ["causal", "feature first", "other recurrence", "last first"])
@pytest.mark.parametrize("name", ["published", "recurrent"])
@torch.no_grad()
def test_a_detail_done_otherwise_gives_other_rows(name: str, swap: str, target: PreTrainedModel) -> None:
    drafter = drafter_of(name)
    state, _ = begun(drafter, target, PROMPTS[:1])
    found, path = tree_logits(drafter, state, PROMPTS[:1]), PATHS[0][:2]
    assert (found[path][0] - path_rows(target, drafter, PROMPTS[0], path, swap)).abs().amax() > 1e-3


@pytest.mark.parametrize("name", ["published", "recurrent", "blocks of three"])
@pytest.mark.parametrize("at_once", [512, 2])
def test_prompts_in_chunks_are_prompts(
    name: str, at_once: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks(drafter_of(name), target, PROMPTS, at_once, monkeypatch)


@pytest.mark.parametrize("policy", [Widths((3, 2, 1)), BestFirst(9), Chain(6)], ids=repr)
@pytest.mark.parametrize("name", ["two layers", "recurrent", "blocks of three"])
def test_steps_leave_what_a_fresh_start_makes(name: str, policy: TreePolicy, target: PreTrainedModel) -> None:
    check_steps(drafter_of(name), target, policy)


@pytest.mark.long(2)
@pytest.mark.parametrize("policy", [Widths((3, 2, 1, 1)), BestFirst(12), Chain(5)], ids=repr)
@pytest.mark.parametrize("name", ["published", "blocks of three"])
def test_greedy_text_is_the_models(name: str, policy: TreePolicy, target: PreTrainedModel) -> None:
    check_greedy(drafter_of(name), target, policy)


@pytest.mark.parametrize("recurs", [False, True])
def test_it_drafts_under_autocast(recurs: bool) -> None:
    model: Any = tiny_model("llama", VOCAB, num_hidden_layers=3).float()
    drafter, ids = falcon_drafter(recurs=recurs), torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    drafter.network.float()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Any = polydraft.generate(model, ids, drafter=drafter, policy=Widths((2, 2, 1)), **options)
        assert torch.equal(found.sequences, model.generate(ids, **options)) and not found.statistics.fallback


# Folders.


def written(folder: Path, target: PreTrainedModel, **changes: Any) -> HeadDrafter[Any]:
    drafter = falcon_drafter(**changes)
    write_falcon(drafter, folder, HuggingFaceModel(target))
    return drafter


@pytest.mark.parametrize("changes", [{"recurs": False, "layers": 1}, {"block": 3}], ids=str)
def test_folders_are_told_and_read_again_bit_for_bit(
    changes: dict[str, Any], tmp_path: Path, target: PreTrainedModel
) -> None:
    drafter = written(tmp_path, target, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["k_mask"] == changes.get("block", 2) and "lstm.weight_hh_l1" in load_file(
        tmp_path / "model.safetensors"
    )
    found: Any = load_head(tmp_path)
    assert (found.network.block, found.network.recurs) == (drafter.network.block, drafter.network.recurs)
    own = {name: value.bfloat16().float() for name, value in drafter.network.state_dict().items()}
    assert own.keys() == found.network.state_dict().keys()
    assert all(torch.equal(found.network.state_dict()[name], value) for name, value in own.items())
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain: Any = polydraft.generate(target, PROMPTS[0], drafter="none", **given)
    text: Any = polydraft.generate(target, PROMPTS[0], drafter=str(tmp_path), **given)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted


def changed(folder: Path, drop: str = "", **config: Any) -> None:
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: one for name, one in said.items() if one != "-"}))
    held = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in held.items() if name != drop}, folder / "model.safetensors")


def test_the_authors_words_alone_are_enough(tmp_path: Path, target: PreTrainedModel) -> None:
    """They say nothing of recurrence, for theirs has none, and a missing `bias` means that there is one."""
    written(tmp_path, target)
    changed(tmp_path, recurs="-", bias="-", architectures="-")
    found: Any = load_head(tmp_path)
    assert not found.network.recurs


DAMAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no block": ("", {"k_mask": "-"}, "k_mask is None; it must be a number"),
    "an empty block": ("", {"k_mask": 0}, "k_mask is 0; it must be a number"),
    "a huge block": ("", {"k_mask": 65}, "k_mask is 65; it must be at most 64"),
    "no answer": ("", {"recurs": "yes"}, "recurs is 'yes'; it must be true or false"),
    "no bias": ("", {"bias": False}, "holds lstm.bias_hh_l0 and 3 more, which this kind of head does not have"),
    "a missing bias": ("lstm.bias_ih_l1", {}, "lstm.bias_ih_l1 is missing"),
    "no recurrent weights": ("lstm.weight_hh_l0", {}, "lstm.weight_hh_l0 is missing"),
    "another width": ("", {"intermediate_size": 12}, r"layers.0.mlp.gate_proj.weight has shape \[24, 16\]"),
    "fewer layers": ("", {"num_hidden_layers": 1}, "holds layers.1.input_layernorm.weight and"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path, target: PreTrainedModel) -> None:
    drop, config, said = DAMAGED[case]
    written(tmp_path, target)
    changed(tmp_path, drop, **config)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_head(tmp_path)
    assert str(caught.value).count(". ") == 0


def test_what_has_no_form_is_refused(tmp_path: Path, target: PreTrainedModel) -> None:
    few = HeadDrafter(falcon_drafter().network, HeadEnds(tokens=torch.arange(4)))
    with pytest.raises(InvalidParameter, match="draft from all of their target's output rows"):
        write_falcon(few, tmp_path, HuggingFaceModel(target))
    with pytest.raises(InvalidParameter, match="at least one pair, not 0"):
        FalconHead(ANATOMY, 0)
