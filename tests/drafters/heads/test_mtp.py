"""MTP modules: their rows by hand, at every depth and of several modules, texts, batches, and folders of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import VOCAB, WIDTH, mtp_drafter
from safetensors.torch import load_file
from test_block_heads import begun, text_of
from test_walks import PATHS, ROWS, changed, rms, without
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

import polydraft
from polydraft.drafters import Session, load_head, write_mtp
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.mtp_head import MtpHead
from polydraft.errors import CheckpointError, InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.reading import Reader, Text
from polydraft.trees import BestFirst, Chain, Frontier, TreePolicy, Widths

KINDS: dict[str, dict[str, Any]] = {
    "one": {},
    "hidden state first": {"hidden_first": True},
    "two": {"modules": 2},
    "three": {"modules": 3},
    "one that hands on y": {"raw": True},
    "two that hand on y": {"modules": 2, "raw": True},
}


def turned(heads: Tensor, places: Tensor) -> Tensor:
    """Return heads "n g h" turned by their places, with the base 100, whose angles are in single precision."""
    half = heads.shape[-1] // 2
    angles = places.float()[:, None] * 100.0 ** -(torch.arange(half) / half)
    both = torch.cat([angles, angles], -1)[:, None]
    return heads * both.cos() + torch.cat([-heads[..., half:], heads[..., :half]], -1) * both.sin()


def module_by_hand(
    own: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor, places: Tensor, sees: Tensor, *, hidden_first: bool
) -> tuple[Tensor, Tensor]:
    """Return y and s' of pairs that see each other so, by the formulas of MTP and of Qwen3's layer."""
    first, second = rms(embedded) * own["enorm.weight"], rms(hidden) * own["hnorm.weight"]
    x = linear(torch.cat([second, first] if hidden_first else [first, second], -1), own["eh_proj.weight"])
    inner = rms(x) * own["block.input_layernorm.weight"]
    q, k, v = (linear(inner, own[f"block.self_attn.{name}_proj.weight"]).unflatten(-1, (-1, 4)) for name in "qkv")
    q, k = (turned(rms(one) * own[f"block.self_attn.{name}_norm.weight"], places) for name, one in (("q", q), ("k", k)))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    found = scaled_dot_product_attention(*(one.transpose(0, 1) for one in (q, k, v)), attn_mask=sees)
    x = x + linear(found.transpose(0, 1).flatten(1), own["block.self_attn.o_proj.weight"])
    inner = rms(x) * own["block.post_attention_layernorm.weight"]
    gate, up = (linear(inner, own[f"block.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    y = x + linear(silu(gate) * up, own["block.mlp.down_proj.weight"])
    return y, rms(y) * own["norm.weight"]


def by_hand(
    head: MtpHead,
    states: Tensor,
    tokens: list[int],
    path: list[int],
    embed: Tensor,
    *,
    hidden_first: bool = False,
    recycles_y: bool = False,
) -> Tensor:
    """Return the state that the row behind a path's last token follows from.

    Module m stands at the places of the target's states, where it reads the token m places further on; the package
    counts places by tokens, and rotary positions, whose angles are in single precision, know none of it. Deeper nodes
    come behind them, each at its module's next places, beside what was made of the node above.

    Args:
        states: the target's own of the text but for the root; one of zeros for a text of one token.
        tokens: those behind each of these states.
        path: the drafted tokens.
    """
    count, long, every = head.depth, len(states), [*tokens, *path]
    own = [
        {name.removeprefix(f"steps.{step}."): one for name, one in head.named_parameters() if f"steps.{step}." in name}
        for step in range(count)
    ]
    read, sources, places = ([list[Any]() for _ in range(count)] for _ in range(3))
    hidden, known, last = states, list[Tensor](), states[-1]
    for depth in range(len(path) + 1):
        step = depth % count
        if depth < count:
            read[step], places[step] = every[depth : depth + long], list(range(long))
            sources[step] = [*hidden]
        else:
            read[step].append(path[depth - 1])
            places[step].append(long - 1 + depth - step)
            sources[step].append(last)
        sees = torch.ones(len(places[step]), len(places[step])).tril().bool()
        given = embed[torch.tensor(read[step])], torch.stack(sources[step]), torch.tensor(places[step]), sees
        both = module_by_hand(own[step], *given, hidden_first=hidden_first)
        hidden = both[0] if recycles_y else both[1]
        known.append(both[1][-1])
        last = hidden[-1]
    return known[-1]


def along(drafter: HeadDrafter[MtpHead], state: Any, text: Text, path: list[int]) -> list[Tensor]:
    """Return the logits behind texts and behind every token of a path below each."""
    grown, _ = drafter.network.root(state.memory, text, state.ends)
    found, rows = list[Tensor](), len(text.lengths)
    for depth in range(len(path) + 1):
        tokens = torch.tensor([[path[depth - 1]]] * rows) if depth else text.last().unsqueeze(-1)
        seen = torch.ones(rows, 1, depth + 1, dtype=torch.bool)
        found.append(grown.logits(Frontier(range(depth, depth + 1), tokens, depth, seen))[:, 0])
    return found


def rows_along(drafter: HeadDrafter[MtpHead], model: Any, path: list[int]) -> tuple[Any, list[Tensor]]:
    """Return what was read of three texts, and the logits along a path below them."""
    text = text_of(ROWS)
    state, features = begun(HuggingFaceModel(model), drafter, text)
    return features, along(drafter, state, text, path)


def wanted_along(
    drafter: HeadDrafter[MtpHead], model: Any, features: Any, path: list[int], row: int, **swapped: bool
) -> Tensor:
    known, output = ROWS[row], model.lm_head.weight
    there = [int((features.places[row] == place).nonzero()[-1]) for place in range(len(known) - 1)]
    states = features.states["final"][row, there].double()
    states = states if there else torch.zeros(1, WIDTH, dtype=torch.float64)
    tokens = known[1:] if there else known
    return linear(
        by_hand(drafter.network, states, tokens, path, model.get_input_embeddings().weight, **swapped), output
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_path_are_those_of_the_formula(kind: str) -> None:
    model: Any = tiny_model(vocab=VOCAB)
    drafter, order = mtp_drafter(**KINDS[kind]), {"hidden_first": kind == "hidden state first"}
    order["recycles_y"] = "raw" in KINDS[kind]
    for path in ([*one, 5] for one in PATHS):
        features, found = rows_along(drafter, model, path)
        for depth, logits in enumerate(found):
            for row in range(3):
                wanted = wanted_along(drafter, model, features, path[:depth], row, **order)
                torch.testing.assert_close(logits[row], wanted, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("raw", [False, True])
def test_the_joined_order_and_the_recycled_state_show_in_the_rows(raw: bool) -> None:
    model: Any = tiny_model(vocab=VOCAB)
    drafter, path = mtp_drafter(raw=raw), PATHS[0][:1]
    features, found = rows_along(drafter, model, path)
    swaps = {"hidden_first": True, "recycles_y": raw}, {"recycles_y": not raw}
    for swapped, depths in zip(swaps, ((0, 1), (1,)), strict=True):
        for depth in depths:
            other = wanted_along(drafter, model, features, path[:depth], 0, **swapped)
            assert float((found[depth][0] - other).abs().max()) > 1e-2


def test_siblings_do_not_change_a_row() -> None:
    """Three children of a root below which two modules end, asked for together and alone."""
    model: Any = tiny_model(vocab=VOCAB)
    drafter, text = mtp_drafter(modules=2), text_of(ROWS)
    state, _ = begun(HuggingFaceModel(model), drafter, text)
    roots, tokens = torch.tensor([[row[-1]] for row in ROWS]), torch.tensor([[7, 3, 8]] * 3)
    wide, own = torch.cat([torch.ones(3, 3, 1), torch.eye(3).expand(3, -1, -1)], -1).bool(), list[Tensor]()
    grown, _ = drafter.network.root(state.memory, text, state.ends)
    grown.logits(Frontier(range(1), roots, 0, torch.ones(3, 1, 1, dtype=torch.bool)))
    grown.logits(Frontier(range(1, 4), tokens, 1, wide))
    below = torch.cat([wide, torch.eye(3).expand(3, -1, -1).bool()], -1)
    together = grown.logits(Frontier(range(4, 7), tokens.flip(1), 2, below))
    for place in range(3):
        _, found = rows_along(drafter, model, [int(tokens[0, place]), int(tokens[0, 2 - place])])
        own.append(found[2])
    torch.testing.assert_close(together, torch.stack(own, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("policy", [Chain(4), Widths((3, 2, 1)), BestFirst(9)], ids=repr)
def test_texts_are_the_targets_alone_and_in_a_ragged_batch(modules: int, policy: TreePolicy) -> None:
    target, drafter = tiny_model(vocab=VOCAB), mtp_drafter(modules=modules)
    padded, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 5 - len(tokens) :], mask[row, 5 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 16}
    wanted: Any = polydraft.generate(target, padded, drafter="none", temperature=0.0, **given)
    found: Any = polydraft.generate(target, padded, drafter=drafter, policy=policy, temperature=0.0, **given)
    assert torch.equal(found.sequences, wanted.sequences) and found.statistics.drafted > 20
    heat: dict[str, Any] = {"drafter": drafter, "policy": policy, "temperature": 1.0, "seed": 3, "max_new_tokens": 16}
    together: Any = polydraft.generate(target, padded, attention_mask=mask, **heat)
    alone: Any = polydraft.generate(target, ROWS[0], **heat)
    assert together.sequences[0].tolist() == alone.sequences[0].tolist()


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("at_once", [1, 3, 512])
def test_keys_of_drafts_are_never_kept(modules: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text whose drafts were not what was committed has the rows of one that was read at once."""
    monkeypatch.setattr("polydraft.drafters.heads.eagle_head.AT_ONCE", at_once)
    target, drafter = HuggingFaceModel(tiny_model(vocab=VOCAB)), mtp_drafter(modules=modules)
    short, whole = text_of([[3, 1, 4], [9, 2, 6]]), text_of([[3, 1, 4, 7, 5, 9], [9, 2, 6, 8]])
    reader = Reader.new(target, 2, 64, drafter.needs.layers)
    session = Session(SamplingParams(), 64, target.vocab_size, reader)
    reader, features = reader.catch_up(short)
    state = drafter.read(drafter.start(short, session), short, features)
    along(drafter, state, short, [7, 5, 2, 2])
    state = drafter.read(state, whole, reader.catch_up(whole)[1])
    fresh, _ = begun(target, drafter, whole)
    for found, wanted in zip(
        along(drafter, state, whole, [1, 2, 3]), along(drafter, fresh, whole, [1, 2, 3]), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("modules", [1, 3])
def test_texts_of_a_running_batch_are_the_targets(modules: int) -> None:
    given: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "batch_size": 2}
    target, drafter = tiny_model(vocab=VOCAB), mtp_drafter(modules=modules)
    found = polydraft.generate_many(target, ROWS, drafter=drafter, policy=Chain(3), **given)
    plain = polydraft.generate_many(target, ROWS, drafter="none", **given)
    assert {one.name: one.tokens for one in found} == {one.name: one.tokens for one in plain}


# Folders of their own.


def written(folder: Path, *, speculators: bool = False, **changes: Any) -> HeadDrafter[MtpHead]:
    drafter = mtp_drafter(**changes)
    write_mtp(drafter, folder, HuggingFaceModel(tiny_model(vocab=VOCAB)), speculators=speculators)
    return drafter


@pytest.mark.parametrize("speculators", [False, True])
def test_a_folder_is_read_again_bit_for_bit_and_drafts(speculators: bool, tmp_path: Path) -> None:
    drafter = written(tmp_path, speculators=speculators)
    found: Any = load_head(str(tmp_path))
    own = {name: value.to(torch.bfloat16).float() for name, value in drafter.network.state_dict().items()}
    read = found.network.state_dict()
    assert {*own} == {*read} and all(torch.equal(read[name], value) for name, value in own.items())
    assert type(found.network) is MtpHead and found.made_for.vocab_size == VOCAB
    names = {name.rpartition(".self_attn")[0] or name for name in load_file(tmp_path / "model.safetensors")}
    beginning = "mtp_layers.0" if speculators else "mtp.layers.0"
    assert names >= {beginning, f"{beginning}.mlp.up_proj.weight"}
    model = tiny_model(vocab=VOCAB)
    plain: Any = polydraft.generate(model, ROWS[0], drafter="none", temperature=0.0, max_new_tokens=8)
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8, "policy": Chain(3)}
    text: Any = polydraft.generate(model, ROWS[0], drafter=str(tmp_path), **given)
    assert torch.equal(text.sequences, plain.sequences) and text.statistics.drafted > 0


@torch.no_grad()
@pytest.mark.parametrize("raw", [False, True])
def test_a_folder_says_which_state_is_handed_on_and_whoever_loads_it_may(raw: bool, tmp_path: Path) -> None:
    model: Any = tiny_model(vocab=VOCAB)
    for speculators in (False, True):
        folder = tmp_path / str(speculators)
        written(folder, speculators=speculators, raw=raw)
        for asked, wanted in ((None, raw), ("raw", True), ("normed", False)):
            found: Any = load_head(folder, recycle=asked, dtype=torch.float64)
            features, logits = rows_along(found, model, PATHS[0][:1])
            for swapped in (False, True):
                other = wanted_along(found, model, features, PATHS[0][:1], 0, recycles_y=wanted != swapped)
                assert (float((logits[1][0] - other).abs().max()) < 1e-6) != swapped
    for word in ("bare", "both"):
        changed(tmp_path / "False", recycle=word)
        with pytest.raises(CheckpointError, match=f"recycle is '{word}'; it must be normed or raw"):
            load_head(tmp_path / "False")


def test_some_of_the_targets_tokens_are_drafted_in_our_form_alone(tmp_path: Path) -> None:
    tokens = torch.tensor([0, 1, 3, 4, 5, 9, 20])
    drafter, target = HeadDrafter(mtp_drafter().network, HeadEnds(tokens=tokens)), tiny_model(vocab=VOCAB)
    write_mtp(drafter, tmp_path / "ours", HuggingFaceModel(target))
    assert torch.equal(load_head(tmp_path / "ours").ends.tokens, tokens)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidParameter, match="speculators' form has all tokens of a target, and the head 7"):
        write_mtp(drafter, tmp_path / "theirs", HuggingFaceModel(target), speculators=True)
    with pytest.raises(InvalidParameter, match="holds one MTP module with Llama's or Qwen's layer"):
        write_mtp(mtp_drafter(modules=2), tmp_path / "two", HuggingFaceModel(target))


DAMAGED: dict[str, tuple[bool, Any, dict[str, Any], str]] = {
    "no projection": (True, without("input_proj.weight"), {}, r"mtp_layers\.0\.input_proj\.weight is missing"),
    "no last norm": (False, without("mtp.norm.weight"), {}, r"mtp\.norm\.weight is missing"),
    "an unknown key": (False, lambda own: own | {"mtp.gate": torch.zeros(1)}, {}, r"holds mtp\.gate, which this kind"),
    "two modules of speculators": (True, None, {"num_nextn_predict_layers": 2}, "is 2; speculators has one module"),
    "more modules than there are": (False, None, {"mtp_num_hidden_layers": 2}, r"mtp\.layers\.1\..* is missing"),
    "layers with a gate": (False, None, {"model_type": "qwen3_next"}, "is 'qwen3_next'; layers of MTP modules in a"),
    "another width": (False, None, {"hidden_size": 8}, r"has shape \[16.*asks for \[8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path) -> None:
    speculators, tensors, config, said = DAMAGED[case]
    written(tmp_path, speculators=speculators)
    changed(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=said) as raised:
        load_head(str(tmp_path))
    assert "\n" not in str(raised.value)
