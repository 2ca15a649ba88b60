"""Kangaroo's adapter: rows of trees by hand, texts, the target's keys, folders, and what these may lack."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import WIDTH, adapter_drafter, every_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedModel

import polydraft
from polydraft import BestFirst, Chain, Confident, Widths
from polydraft.drafters import (
    AdapterDrafter,
    DraftRequest,
    SelfDrafter,
    Session,
    View,
    is_head,
    load_adapter,
    load_head,
    write_adapter,
    write_falcon,
)
from polydraft.drafters.heads.formats.head_kinds import KINDS
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.drafters.itself import adapter
from polydraft.drafters.itself.adapter import Adapter
from polydraft.engine.load import draft_for
from polydraft.errors import CheckpointError, InvalidParameter, TargetMismatch
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text
from polydraft.rows import cut
from polydraft.rows import put as put_row
from polydraft.schemes import IID
from polydraft.trees import Frontier, TreePolicy

VOCAB, EXIT = 24, 2
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [4]]
PATHS = [(5, 7, 2, 4), (5, 7, 9, 1), (8, 1, 2, 4)]
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


def drafter(exit_layer: int = EXIT) -> AdapterDrafter:
    return adapter_drafter(exit_layer=exit_layer)


def text_of(rows: Sequence[Sequence[int]]) -> Text:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), 40, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, lengths)


# The formula, written again.


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states / torch.sqrt((states**2).mean(-1, keepdim=True) + 1e-6)


def turned(heads: Tensor, places: Tensor) -> Tensor:
    """Return heads "n g h" turned by their places, whose angles are in single precision."""
    half = heads.shape[-1] // 2
    angles = places.float()[:, None] * 10_000.0 ** -(torch.arange(half) / half)
    both = torch.cat([angles, angles], -1)[:, None]
    return heads * both.cos() + torch.cat([-heads[..., half:], heads[..., :half]], -1) * both.sin()


def row_by_hand(target: Any, own: AdapterDrafter, tokens: list[int], swap: str = "") -> Tensor:
    """Return the logits behind a text, by the adapter's formula over the output of the target's first layers."""
    weights = dict(own.network.named_parameters())
    exit_layer = own.exit_layer + (swap == "another exit")
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states[exit_layer][0]
    layer, places = "layers.0.self_attn.", torch.arange(len(tokens))
    read = states if swap == "no norm before" else rms(states, weights["layers.0.input_layernorm.weight"])
    q, k, v = (linear(read, weights[f"{layer}{name}_proj.weight"]).unflatten(-1, (-1, 4)) for name in "qkv")
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (turned(k, places), v))
    q, k, v = (one.transpose(0, 1) for one in (turned(q, places), k, v))
    seen = scaled_dot_product_attention(q, k, v, is_causal=True)
    made = linear(seen.transpose(0, 1).flatten(1), weights[f"{layer}o_proj.weight"])
    made = made if swap == "no residual" else states + made
    made = made if swap == "no norm behind" else rms(made, weights["norm.weight"])
    return linear(made[-1], target.lm_head.weight)


class Begun:
    """A drafter and its target that have read texts."""

    def __init__(self, model: PreTrainedModel, own: AdapterDrafter, rows: list[list[int]], chunk: int | None = None):
        self.own, self.target, self.rows = own, HuggingFaceModel(model), rows
        text, size = text_of(rows), self.target.vocab_size
        reader = Reader.new(self.target, len(rows), 64, own.needs.layers)
        self.state = own.start(text, Session(SamplingParams(), 64, size, reader))
        while True:
            reader, features = reader.catch_up(text, chunk)
            if features is None:
                break
            self.state = own.read(self.state, text, features)
        self.reader = reader

    def tree(self, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Tensor]:
        """Return the logits of every node of the tree of all paths, by its path: "b v"."""
        found, nodes = dict[tuple[int, ...], Tensor](), list[tuple[int, ...]]()
        proposing = list[Any]()
        monkeypatch.setattr(adapter, "draft_rows", lambda logits, *_: logits)
        monkeypatch.setattr(
            adapter,
            "grow",
            lambda root, policy, scheme, propose, *_, **__: proposing.append(propose) or adapter.Draft.nothing(root),
        )
        text = text_of(self.rows)
        request = DraftRequest(text, IID(), Chain(4), Noise.from_seed(0, len(self.rows)), self.reader)
        self.own.draft(self.state, request)
        for depth in range(len(PATHS[0]) + 1):
            now = [*dict.fromkeys(path[:depth] for path in PATHS)]
            start, nodes = len(nodes), [*nodes, *now]
            ids = [[path[-1] if path else row[-1] for path in now] for row in self.rows]
            above = torch.tensor([[path[: len(one)] == one for one in nodes] for path in now])
            frontier = Frontier(range(start, len(nodes)), torch.tensor(ids), depth, above.expand(len(ids), -1, -1))
            found |= dict(zip(now, proposing[0](frontier).unbind(1), strict=True))
        monkeypatch.undo()
        return found


@pytest.mark.wrong_types  # `Begun.tree` reads rows where laws are due
@pytest.mark.parametrize("exit_layer", [1, 2])
@torch.no_grad()
def test_rows_of_trees_are_those_of_the_formula(
    exit_layer: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = drafter(exit_layer)
    for path, logits in Begun(target, own, ROWS).tree(monkeypatch).items():
        for row, text in enumerate(ROWS):
            wanted = row_by_hand(target, own, [*text, *path])
            torch.testing.assert_close(logits[row], wanted, atol=1e-6, rtol=1e-6)  # angles in single precision


@pytest.mark.wrong_types  # `Begun.tree` reads rows where laws are due
@pytest.mark.parametrize("swap", ["another exit", "no norm before", "no residual", "no norm behind"])
@torch.no_grad()
def test_a_detail_done_otherwise_gives_other_rows(
    swap: str, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, path = drafter(1), PATHS[0]
    found = Begun(target, own, ROWS[:1]).tree(monkeypatch)[path][0]
    assert float((found - row_by_hand(target, own, [*ROWS[0], *path], swap)).abs().max()) > 1e-3


@pytest.mark.wrong_types  # `Begun.tree` reads rows where laws are due
@pytest.mark.parametrize("chunk", [1, 4])
@torch.no_grad()
def test_prompts_in_chunks_and_rows_that_join_are_prompts(
    chunk: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, newcomer = drafter(), [8, 8, 2, 0]
    begun = Begun(target, own, [list(row) for row in ROWS], chunk)
    other = Begun(target, own, [newcomer])
    begun.state = put_row(cut(begun.state, 1, 0), 1, other.state)
    begun.reader, begun.rows[1] = begun.reader.put(1, other.reader), newcomer
    for path, logits in begun.tree(monkeypatch).items():
        for row, text in enumerate(begun.rows):
            wanted = row_by_hand(target, own, [*text, *path])
            torch.testing.assert_close(logits[row], wanted, atol=1e-6, rtol=1e-6)


# Texts.


@pytest.mark.long(2)
@pytest.mark.parametrize(
    "policy", [None, Chain(4), Widths((3, 2, 1)), BestFirst(9), Confident((2, 1, 1), 0.2)], ids=repr
)
def test_greedy_text_is_the_models(policy: TreePolicy | None, target: PreTrainedModel) -> None:
    own = drafter()
    plain: list[Any] = [polydraft.generate(target, [row], drafter="none", **GREEDY) for row in ROWS]
    alone = [one.sequences[0].tolist() for one in plain]
    width = max(map(len, ROWS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    options: dict[str, Any] = {"drafter": own, "policy": policy, **GREEDY}
    found: Any = polydraft.generate(target, ids, attention_mask=mask, pad_token_id=0, **options)
    assert not found.statistics.fallback and found.statistics.drafted > 0
    for row, prompt in enumerate(ROWS):
        assert found.sequences[row, width - len(prompt) :].tolist() == alone[row]
        single: Any = polydraft.generate(target, [prompt], **options)
        assert single.sequences[0].tolist() == alone[row]
    many = polydraft.generate_many(target, [*ROWS, ROWS[0][:5]], batch_size=2, **options)
    texts = {one.name: one.tokens for one in many}
    assert [texts[row] for row in range(3)] == [one[len(ROWS[row]) :] for row, one in enumerate(alone)]
    assert not many.statistics.fallback
    heat: dict[str, Any] = {"drafter": own, "policy": policy, "temperature": 1.0, "seed": 3, "max_new_tokens": 9}
    together: Any = polydraft.generate(target, torch.tensor([ROWS[0][:3], ROWS[1]]), **heat)
    single = polydraft.generate(target, [ROWS[0][:3]], **heat)
    assert together.sequences[0].tolist() == single.sequences[0].tolist()


def test_it_drafts_for_some_rows_of_a_running_batch(target: PreTrainedModel) -> None:
    prompts, options = {"a": [3, 1, 4, 1, 5], "b": [2, 7, 1], "c": [4, 4]}, {"max_new_tokens": 12, "do_sample": False}
    plain = {one.name: one.tokens for one in polydraft.generate_many(target, prompts, drafter="none", **options)}
    own = {name: {"drafter": drafter(), "policy": 3} for name in ("a", "c")}
    for common in ({"drafter": "none"}, {"drafter": every_head()["an EAGLE head"]}):
        run = polydraft.generate_many(target, prompts, batch_size=2, per_prompt=own, **common, **options)
        assert {one.name: one.tokens for one in run} == plain and not run.statistics.fallback


@pytest.mark.parametrize("weights", ["fused", "own modules"])
def test_the_first_layers_spare_the_head_and_never_read_a_prompt_again(
    weights: str, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft costs a pass of the first layers over one token, and one product with the head."""
    seen, products = list[int](), list[int]()
    passed, unembedded = HuggingFaceModel.forward, HuggingFaceModel.unembedded

    def noted(self: Any, tokens: Tensor, *rest: Any, **named: Any) -> Any:
        if self.layers == EXIT:
            seen.append(tokens.shape[1])
        return passed(self, tokens, *rest, **named)

    def counted(self: Any, states: Tensor) -> Tensor:
        products.append(states.shape[1])
        return unembedded(self, states)

    if weights == "own modules":
        monkeypatch.setattr(HuggingFaceModel, "_fuse", lambda _: "tried")
    polydraft.generate(target, [ROWS[0]], drafter=drafter(), policy=Chain(3), **GREEDY)  # finds out about the model
    monkeypatch.setattr(HuggingFaceModel, "forward", noted)
    monkeypatch.setattr(HuggingFaceModel, "unembedded", counted)
    found: Any = polydraft.generate(target, [ROWS[0]], drafter=drafter(), policy=Chain(3), **GREEDY)
    assert {*products} == {1} and found.statistics.drafted - 3 <= len(products) <= 3 * found.statistics.steps
    assert seen.count(1) >= len(products) and sum(seen) - len(products) <= 64, "but for trials of a few tokens"


# Folders.


def written(folder: Path, target: PreTrainedModel, exit_layer: int = EXIT) -> AdapterDrafter:
    own = drafter(exit_layer)
    write_adapter(own, folder, HuggingFaceModel(target), card="A card.")
    return own


def test_folders_are_told_and_read_again_bit_for_bit(tmp_path: Path, target: PreTrainedModel) -> None:
    own = written(tmp_path, target)
    config, held = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert [one.name for one in KINDS if one.told(config)] == ["adapter"]
    assert [one.name for one in KINDS if one.holds({name: tuple(one.shape) for name, one in held.items()})] == [
        "adapter"
    ]
    assert is_head(tmp_path) and (tmp_path / "README.md").read_text() == "A card."
    found = load_head(tmp_path)
    assert isinstance(found, AdapterDrafter) and found.exit_layer == EXIT
    wanted = {name: value.bfloat16().float() for name, value in own.network.state_dict().items()}
    assert wanted.keys() == held.keys() == found.network.state_dict().keys()
    assert all(torch.equal(found.network.state_dict()[name], value) for name, value in wanted.items())
    plain: Any = polydraft.generate(target, ROWS[0], drafter="none", **GREEDY)
    for one in (str(tmp_path), load_adapter(tmp_path, target), load_adapter(tmp_path, target, EXIT)):
        text: Any = polydraft.generate(target, ROWS[0], drafter=one, **GREEDY)
        assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted
        assert not text.statistics.fallback


def changed(folder: Path, drop: str = "", add: str = "", **config: Any) -> None:
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: one for name, one in said.items() if one != "-"}))
    held = {name: one for name, one in load_file(folder / "model.safetensors").items() if name != drop}
    save_file(held | ({add: torch.ones(2)} if add else {}), folder / "model.safetensors")


def test_a_word_names_an_adapter_behind_an_exit(tmp_path: Path, target: PreTrainedModel) -> None:
    written(tmp_path, target)
    word = f"self:exit={EXIT},adapter={tmp_path}"
    found: Any = draft_for(word, target)
    assert found.exit_layer == EXIT and found.name == "adapter" and View.named(word).word == word
    given: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "policy": Chain(2)}
    texts: Any = [polydraft.generate(target, torch.tensor([[3, 1, 4]]), drafter=one, **given) for one in (word, "none")]
    assert torch.equal(texts[0].sequences, texts[1].sequences) and texts[0].statistics.drafted
    for wrong in (f"self:adapter={tmp_path}", f"self:int8,{word[5:]}", f"{word},keys=recent", f"{word},skip-mlp=0"):
        with pytest.raises(InvalidParameter, match="stands behind an exit"):
            View.named(wrong)
    with pytest.raises(InvalidParameter, match="load_adapter"):
        SelfDrafter(View.named(word))


def test_the_authors_folders_say_no_exit_and_may_be_pickled(tmp_path: Path, target: PreTrainedModel) -> None:
    """Theirs is the configuration of a model of one layer, with sizes of an inner layer that is not there."""
    written(tmp_path, target, 1)
    changed(tmp_path, architectures=["LlamaForCausalLM"], exit_layer="-", rope_theta="-", intermediate_size=11008)
    held = {**load_file(tmp_path / "model.safetensors"), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    (tmp_path / "model.safetensors").unlink()
    torch.save(held, tmp_path / "pytorch_model.bin")
    assert is_head(tmp_path)
    assert load_adapter(tmp_path, target).exit_layer == 2 and load_adapter(tmp_path, target, 1).exit_layer == 1


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "no exit": ({"exit_layer": 0}, "exit_layer is 0; it must be a number"),
    "a strange exit": ({"exit_layer": "two"}, "exit_layer is 'two'; it must be a number"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2; an adapter of these sizes has 1"),
    "other heads": ({"head_dim": 8}, "head_dim is 8; an adapter of these sizes has 4"),
    "odd heads": ({"num_attention_heads": 3}, "has 3 query heads on 2 key heads in a width of 16"),
    "a bias": ({"attention_bias": True}, "attention_bias is True; adapters have no biases"),
    "another base": ({"rope_theta": 5e5}, "is 500000.0; the authors' code turns with the base 10000, so write that"),
    "another width": (
        {"hidden_size": 32, "head_dim": "-"},
        r"layers.0.input_layernorm.weight has shape \[16\], and its config.json",
    ),
    "a missing norm": ({"drop": "norm.weight"}, "norm.weight is missing"),
    "a missing product": ({"drop": "layers.0.self_attn.o_proj.weight"}, "layers.0.self_attn.o_proj.weight is missing"),
    "an inner layer": ({"add": "layers.0.mlp.up_proj.weight"}, "holds layers.0.mlp.up_proj.weight, which this kind"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path, target: PreTrainedModel) -> None:
    changes, said = DAMAGED[case]
    written(tmp_path, target)
    changed(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said) as caught:
        load_head(tmp_path)
    assert str(caught.value).count(". ") == 0


def test_adapters_for_other_targets_are_refused(tmp_path: Path, target: PreTrainedModel) -> None:
    written(tmp_path, target)
    wide = tiny_model("llama", VOCAB, num_hidden_layers=3, hidden_size=32)
    with pytest.raises(TargetMismatch, match="adapter is 16 wide and the target's states 32"):
        polydraft.generate(wide, ROWS[0], drafter=load_head(tmp_path), max_new_tokens=2)
    with pytest.raises(TargetMismatch, match="trained for a target of 3 layers and this one has 4"):
        polydraft.generate(
            tiny_model("llama", VOCAB, num_hidden_layers=4), ROWS[0], drafter=str(tmp_path), max_new_tokens=2
        )
    with pytest.raises(TargetMismatch, match="trained for a target of 24 tokens and this one has 48"):
        polydraft.generate(
            tiny_model("llama", 48, num_hidden_layers=3), ROWS[0], drafter=str(tmp_path), max_new_tokens=2
        )
    with pytest.raises(InvalidParameter, match="stands behind 2 layers, not 1"):
        load_adapter(tmp_path, target, 1)
    own = adapter_drafter(exit_layer=3)
    with pytest.raises(TargetMismatch, match="stands behind 3 layers and the target has 3"):
        polydraft.generate(target, ROWS[0], drafter=own, max_new_tokens=2)


def test_another_kind_of_head_is_no_adapter(tmp_path: Path, target: PreTrainedModel) -> None:
    write_falcon(every_head()["a Falcon head"], tmp_path, HuggingFaceModel(target))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"holds a head of another kind .*, and no adapter"):
        load_adapter(tmp_path, target)


def test_an_adapter_is_as_wide_as_its_heads() -> None:
    with pytest.raises(InvalidParameter, match="cannot share"):
        Adapter(Anatomy(WIDTH, WIDTH, 3, 2, 4))
