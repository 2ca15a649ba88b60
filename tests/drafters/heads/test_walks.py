"""Heads that walk: their rows by hand, texts, laws of batches, folders of their authors, and what these may lack."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import WALKS, walk
from safetensors.torch import load_file, save_file
from test_block_heads import begun, text_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

import polydraft
from polydraft.drafters import load_head, write_hydra, write_mlp, write_redrafter, write_walk
from polydraft.drafters.heads.drafter import joined_states
from polydraft.drafters.heads.walks.hydra import Hydra
from polydraft.errors import CheckpointError
from polydraft.models import HuggingFaceModel
from polydraft.reading import Reader, Text
from polydraft.training.heads.losses import last_state_training, row_losses
from polydraft.training.heads.losses.last_state_training import WalkTraining
from polydraft.training.heads.losses.row_losses import TargetEnds
from polydraft.training.heads.new_heads import MEDUSA_LOSSES
from polydraft.trees import BestFirst, Chain, Frontier, TreePolicy, Widths

VOCAB, WIDTH, ROWS = 24, 16, [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
PATHS = [[7, 0, 11, 2], [7, 0, 3, 2], [7, 8, 11, 2]]
"""They share beginnings, and the last token is below what was learnt."""
FEW = torch.tensor([1, 2, 5, 9, 11, 20])


def rms(values: Tensor) -> Tensor:
    return values / torch.sqrt((values**2).mean(-1, keepdim=True) + 1e-6)


def turned(values: Tensor) -> Tensor:
    """Return heads "n g h" turned by their places, with the base 100."""
    half = values.shape[-1] // 2
    angles = torch.arange(len(values)).double()[:, None] * 100.0 ** -(torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = values[..., :half], values[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def prefixed(own: dict[str, Tensor], states: Tensor) -> Tensor:
    """Return what Hydra++'s layer makes of a text's last token, by Llama's formulas."""
    inner = rms(states) * own["prefix.input_layernorm.weight"]
    q, k, v = (
        linear(inner, own[f"prefix.self_attn.{name}_proj.weight"]).unflatten(-1, (-1, WIDTH // 2)) for name in "qkv"
    )
    q, k = turned(q), turned(k)
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    seen = scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
    states = states + linear(seen.transpose(0, 1).flatten(1), own["prefix.self_attn.o_proj.weight"])
    inner = rms(states) * own["prefix.post_attention_layernorm.weight"]
    gate, up = (linear(inner, own[f"prefix.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    states = states + linear(silu(gate) * up, own["prefix.mlp.down_proj.weight"])
    return (rms(states) * own["norm.weight"])[-1]


def by_hand(kind: str, network: Any, states: Tensor, path: list[int], embed: Tensor, output: Tensor) -> Tensor:
    """Return the logits behind a path's last token, by the published formulas.

    Args:
        states: the target's last hidden states of the text but for the root; none of a text of one token.
    """
    own = dict(network.named_parameters())
    last = len(path) - 1
    h = states[-1] if len(states) else torch.zeros(len(network.reads) * WIDTH, dtype=torch.float64)
    if kind == "joined":
        h = own["fc.weight"] @ torch.cat([rms(one) for one in h.split(WIDTH)])
        s, cell = h, torch.zeros(WIDTH, dtype=torch.float64)
        norm = lambda name, x: rms(x) * own[f"step.{name}.norm.weight"] + own[f"step.{name}.shift"]  # noqa: E731
        for token in path:
            a = own["token_proj.weight"] @ embed[token]
            f, i, o, g = (own[f"step.proj.{one}.weight"] @ s + a for one in ("forget", "input", "output", "cell"))
            cell = f.sigmoid() * cell + i.sigmoid() * gelu(norm("cell_ln", g))
            s = o.sigmoid() * gelu(norm("state_ln", cell))
        return output @ (rms(s + own["hidden_proj.weight"] @ h) * own["norm.weight"])
    if kind.startswith(("mlp", "lstm")):
        kept = 0.5 ** (0.5 / 3)
        c = sqrt((1 - kept**2) * 12 / 2) / kept
        s, cell = (rms(h) / sqrt(2) if network.scaled else h), torch.zeros(12, dtype=torch.float64)
        for depth, token in enumerate(path):
            at = {name.removeprefix(f"stages.{min(depth, 2)}."): one for name, one in own.items()}
            norm = lambda name, x, at=at: rms(x) * at[f"{name}.norm.weight"] + at[f"{name}.shift"]  # noqa: E731
            if kind == "mlp":
                s = gelu(norm("ln", at["proj.weight"] @ s + c * at["emb.weight"][token]))
            else:
                table = lambda gate, at=at: at.get(f"emb.{gate}.weight", at["emb.forget.weight"])  # noqa: E731
                f, i, o, g = (
                    at[f"proj.{gate}.weight"] @ s + c * table(gate)[token]
                    for gate in ("forget", "input", "output", "cell")
                )
                cell = f.sigmoid() * cell + i.sigmoid() * gelu(norm("cell_ln", g))
                s = o.sigmoid() * gelu(norm("state_ln", cell))
        return own[f"stages.{min(last, 2)}.lm_head.weight"] @ s
    if kind.startswith("redrafter"):
        s = torch.zeros_like(h)
        for token in path:
            e = embed[token]
            s = silu(own["rnn_w.weight"] @ e + own["rnn_u.weight"] @ s + own["rnn_u.bias"]) if network.rnn_w else e + s
        y = torch.cat([h, s])
        y = own["input_proj.weight"] @ y + own["input_proj.bias"] if "input_proj.weight" in own else y
        for block in range(len(network.blocks)):
            y = y + silu(own[f"blocks.{block}.linear.weight"] @ y + own[f"blocks.{block}.linear.bias"])
        return own["lm_head.weight"] @ y
    h = prefixed(own, states) if kind == "hydra++" and len(states) else h
    head = min(last, 2)
    own = {name.removeprefix(f"heads.{head}."): one for name, one in own.items()}
    read = path if last <= 2 else [*path[:2], path[-1]]
    x = torch.cat([h, *(embed[token] for token in read)])
    x = (
        own["res_connection.weight"] @ x
        + own["res_connection.bias"]
        + silu(own["linear.weight"] @ x + own["linear.bias"])
    )
    for _ in range(network.layers - 1):
        x = x + silu(own["block.linear.weight"] @ x + own["block.linear.bias"])
    return own["lm_head.weight"] @ x + own["lm_head.bias"] if "lm_head.weight" in own else output @ x


@pytest.mark.parametrize("tokens", [None, FEW], ids=["all tokens", "few"])
@pytest.mark.parametrize("kind", WALKS)
def test_the_rows_of_a_path_are_those_of_the_formulas(kind: str, tokens: Tensor | None) -> None:
    model: Any = tiny_model(vocab=VOCAB).double()
    target, text, drafter = HuggingFaceModel(model), text_of(ROWS), walk(kind, tokens=tokens)
    state, features = begun(target, drafter, text)
    assert features is not None
    embed, output = model.get_input_embeddings().weight.double(), model.lm_head.weight.double()
    output = output if tokens is None else output[tokens]
    for path in PATHS:
        grown, _ = drafter.network.root(state.memory, text, state.ends)
        for depth in range(4):
            roots = [[row[-1]] for row in ROWS]
            tokens = torch.tensor(roots) if not depth else torch.tensor([[path[depth - 1]]] * 3)
            frontier = Frontier(range(depth, depth + 1), tokens, depth, torch.ones(3, 1, depth + 1, dtype=torch.bool))
            logits = grown.logits(frontier)
            for row, known in enumerate(ROWS):
                there = [int((features.places[row] == place).nonzero()[-1]) for place in range(len(known) - 1)]
                states = joined_states(features, drafter.needs.layers)[row, there].double()
                whole = [known[-1], *path[:depth]]
                wanted = by_hand(kind, drafter.network, states, whole, embed, output)
                torch.testing.assert_close(logits[row, 0].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.long(2)
@pytest.mark.parametrize("policy", [Chain(3), Chain(5), Widths((3, 2, 1)), BestFirst(9)], ids=repr)
@pytest.mark.parametrize("kind", WALKS)
def test_greedy_text_is_plain_text_and_every_row_is_what_it_is_alone(kind: str, policy: TreePolicy) -> None:
    target, drafter = tiny_model(vocab=VOCAB), walk(kind)
    padded, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 5 - len(tokens) :], mask[row, 5 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24}
    wanted: Any = polydraft.generate(target, padded, drafter="none", temperature=0.0, **given)
    found: Any = polydraft.generate(target, padded, drafter=drafter, policy=policy, temperature=0.0, **given)
    assert torch.equal(found.sequences, wanted.sequences) and found.statistics.drafted > 20
    heat: dict[str, Any] = {"drafter": drafter, "policy": policy, "temperature": 1.0, "seed": 3}
    together: Any = polydraft.generate(target, padded, **heat, **given)
    alone: Any = polydraft.generate(target, ROWS[0], max_new_tokens=24, **heat)
    assert together.sequences[0].tolist() == alone.sequences[0].tolist()


@pytest.mark.parametrize("kind", ["hydra++", "lstm", "redrafter"])
def test_what_is_read_in_pieces_is_what_is_read_at_once(kind: str) -> None:
    target, drafter = HuggingFaceModel(tiny_model(vocab=VOCAB)), walk(kind)
    whole, _ = begun(target, drafter, text_of(ROWS[:1]))
    parts, _ = begun(target, drafter, text_of([ROWS[0][:3]]))
    reader, _ = Reader.new(target, 1, 64, drafter.needs.layers).catch_up(text_of([ROWS[0][:3]]))
    _, features = reader.catch_up(text_of(ROWS[:1]))
    parts = drafter.read(parts, text_of(ROWS[:1]), features)
    asked: Text = text_of(ROWS[:1])
    torch.testing.assert_close(parts.memory.before_root(asked), whole.memory.before_root(asked), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", WALKS)
def test_what_is_learnt_is_what_is_drafted(kind: str) -> None:
    model: Any = tiny_model(vocab=VOCAB)
    drafter = walk(kind)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    final, lse = out.hidden_states[-1].float(), out.logits.logsumexp(-1).float()
    reads = [-1 if layer == "final" else layer for layer in drafter.needs.layers]
    read = torch.cat([out.hidden_states[layer].float() for layer in reads], -1)
    training = WalkTraining(drafter.network.float(), TargetEnds.of(model), None)
    found = training(ids, torch.ones_like(ids), read, final, lse)
    assert found["count"].tolist() == [6, 5, 4]
    drafter.network.double()
    embed, output = (one.weight.detach().double() for one in (model.get_input_embeddings(), model.lm_head))
    for depth in range(3):
        both = list[Tensor]()
        for place in range(8 - depth - 2):
            path = ids[0, place + 1 : place + 2 + depth].tolist()
            mine = by_hand(kind, drafter.network, read[0, : place + 1].double(), path, embed, output).softmax(-1)
            both.append(torch.minimum(mine, out.logits[0, place + 1 + depth].double().softmax(-1)).sum())
        assert float(found["overlap"][depth]) == pytest.approx(float(torch.stack(both).mean()), abs=1e-4)


@pytest.mark.parametrize("kind", ["joined", "hydra++", "lstm"])
def test_texts_of_a_running_batch_are_the_targets(kind: str) -> None:
    given: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "batch_size": 2}
    target = tiny_model(vocab=VOCAB)
    found = polydraft.generate_many(target, ROWS, drafter=walk(kind), policy=Chain(3), **given)
    plain = polydraft.generate_many(target, ROWS, drafter="none", **given)
    assert {one.name: one.tokens for one in found} == {one.name: one.tokens for one in plain}


@pytest.mark.parametrize("loss", MEDUSA_LOSSES)
def test_steps_lower_the_loss_of_a_joined_walk_and_gradients_reach_everything(loss: str) -> None:
    model: Any = tiny_model(vocab=VOCAB)
    network = walk("joined", spread=0.0, tokens=FEW).network.float().requires_grad_(True)
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    final, read = out.hidden_states[-1].float(), torch.cat([out.hidden_states[one].float() for one in (1, 0, -1)], -1)
    training = WalkTraining(network, TargetEnds.of(model, FEW), MEDUSA_LOSSES[loss])
    given = ids, torch.ones_like(ids), read, final, out.logits.logsumexp(-1).float()
    optimizer, losses = torch.optim.Adam(network.parameters(), 0.01), list[float]()
    for _ in range(8):
        found = training(*given)["loss"]
        optimizer.zero_grad()
        found.backward()
        assert all(one.grad is not None and bool(one.grad.any()) for one in network.parameters())
        optimizer.step()
        losses.append(float(found.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("loss", MEDUSA_LOSSES)
def test_rows_that_are_made_a_few_at_a_time_are_the_same_and_less_is_held(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model(vocab=VOCAB)
    network = walk("joined", tokens=FEW).network.float().requires_grad_(True)
    ids = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    final, read = out.hidden_states[-1].float(), torch.cat([out.hidden_states[one].float() for one in (1, 0, -1)], -1)
    training, found = WalkTraining(network, TargetEnds.of(model, FEW), MEDUSA_LOSSES[loss]), list[Any]()
    monkeypatch.setattr(row_losses, "STATES", 16)
    for most in (10**9, 0):
        monkeypatch.setattr(last_state_training, "MOST_NUMBERS", most)
        held = list[bool]()

        def kept(one: Tensor, held: list[bool] = held) -> Tensor:
            held.append(one.shape[-1:] == FEW.shape)
            return one

        with saved_tensors_hooks(kept, lambda one: one):
            made = training(ids, torch.ones_like(ids), read, final, out.logits.logsumexp(-1).float())
        slopes = torch.autograd.grad(made["loss"], [*network.parameters()])
        found.append((made["loss"].detach(), made["overlap"], *slopes, sum(held)))
    (*whole, rows), (*parts, none) = found
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)
    assert rows and not none


@pytest.mark.parametrize("kind", ["joined", "hydra++"])
def test_a_text_whose_head_fails_goes_on_without_drafts(kind: str) -> None:
    target, drafter = tiny_model(vocab=VOCAB), walk(kind)
    broken = drafter.network.norm.weight
    broken.fill_(torch.nan)
    given: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
    with pytest.warns(RuntimeWarning, match="drafter failed .*; the rest is decoded without drafts"):
        found: Any = polydraft.generate(target, ROWS[0], drafter=drafter, policy=Chain(3), **given)
    plain: Any = polydraft.generate(target, ROWS[0], drafter="none", **given)
    assert torch.equal(found.sequences, plain.sequences)


def written(kind: str, folder: Path) -> Any:
    drafter, target = walk(kind), HuggingFaceModel(tiny_model(vocab=VOCAB))
    {"j": write_walk, "m": write_mlp, "l": write_mlp, "r": write_redrafter, "h": write_hydra}[kind[0]](
        drafter, folder, target
    )
    return drafter


@pytest.mark.parametrize("kind", WALKS)
def test_folders_are_told_and_read_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    drafter = written(kind, tmp_path)
    found: Any = load_head(str(tmp_path))
    assert found.name == drafter.name and type(found.network) is type(drafter.network)
    own = {name: value.to(torch.bfloat16).float() for name, value in drafter.network.state_dict().items()}
    read = found.network.state_dict()
    assert {*own} <= {*read} and all(torch.equal(read[name], value) for name, value in own.items())
    model = tiny_model(vocab=VOCAB)
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    plain: Any = polydraft.generate(model, ROWS[0], drafter="none", **given)
    text: Any = polydraft.generate(model, ROWS[0], drafter=str(tmp_path), **given)
    assert torch.equal(text.sequences, plain.sequences)


def changed(folder: Path, tensors: Any = None, **config: Any) -> None:
    """Change a folder's configuration, or its tensors by a function of them."""
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: value for name, value in said.items() if value != "-"}))
    if tensors is not None:
        (file,) = folder.glob("*.safetensors")
        save_file({name: one.clone() for name, one in tensors(load_file(file)).items()}, file)


@pytest.mark.parametrize("kind", ["hydra, rows", "hydra++"])
def test_hydras_heads_may_be_pickled(kind: str, tmp_path: Path) -> None:
    written(kind, tmp_path)
    before: Any = load_head(str(tmp_path))
    file = tmp_path / "hydra_lm_head.safetensors"
    torch.save(load_file(file), file.with_suffix(".pt"))
    file.unlink()
    after: Any = load_head(str(tmp_path))
    assert all(
        torch.equal(value, after.network.state_dict()[name]) for name, value in before.network.state_dict().items()
    )


def tied(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let an LSTM's folder hold one of each table."""
    kept = {name: one for name, one in found.items() if ".1." not in name and ".2." not in name}
    proj = {f"speculator.{gate}_proj.1.weight" for gate in ("forget", "input", "output", "cell")}
    return kept | {name: found[name] for name in proj}


def copies(found: dict[str, Tensor]) -> dict[str, Tensor]:
    table = found["speculator.forget_emb.0.weight"]
    return found | {f"speculator.{gate}_emb.0.weight": table for gate in ("input", "output", "cell")}


def test_tied_tables_may_stand_once_or_as_equal_copies(tmp_path: Path) -> None:
    written("lstm", tmp_path)
    changed(tmp_path, tied, tie_weights=True)
    read: Any = load_head(str(tmp_path))
    assert read.network.stage(2).lm_head.weight.equal(read.network.stage(0).lm_head.weight)
    assert read.network.stage(2).proj["cell"].weight.equal(read.network.stage(1).proj["cell"].weight)
    changed(tmp_path, copies)
    load_head(str(tmp_path))
    changed(tmp_path, lambda found: found | {"speculator.cell_emb.0.weight": 2 * found["speculator.cell_emb.0.weight"]})
    with pytest.raises(CheckpointError, match=r"cell_emb.0.weight is another table than the first, and tie_lstm_embs"):
        load_head(str(tmp_path))


def as_snowflakes(found: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {name: name.replace("speculator.", "") for name in found}
    return {
        ".".join([*own.split(".")[:2], "0", *own.split(".")[2:]]) if not own.startswith("head.") else own: found[name]
        for name, own in names.items()
    }


@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "as we write it"])
def test_a_sum_rnn_of_snowflakes_is_an_mlp_speculator(ours: bool, tmp_path: Path) -> None:
    drafter, sizes = walk("mlp"), {"inner_dim": "12", "emb_dim": "12", "proj_dim": "12", "input_hidden_dim": WIDTH}
    write_mlp(drafter, tmp_path, HuggingFaceModel(tiny_model(vocab=VOCAB)), arctic=ours)
    if ours:
        config = json.loads((tmp_path / "config.json").read_text())
        assert config.items() >= {**sizes, "method": "sum_rnn"}.items()
        assert "speculator.ln.1.0.bias" in load_file(tmp_path / "model.safetensors")
    else:
        changed(tmp_path, as_snowflakes, architectures=["ArcticMLPSpeculatorPreTrainedModel"], **sizes)
    read: Any = load_head(str(tmp_path))
    for name, value in drafter.network.state_dict().items():
        assert torch.equal(read.network.state_dict()[name], value.to(torch.bfloat16).float())


def without(*names: str) -> Any:
    return lambda found: {name: one for name, one in found.items() if not name.endswith(names)}


def ungrounded(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return found | {"hydra_mlp.0.0.linear.weight": torch.zeros(WIDTH, WIDTH)}


def narrow(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return found | {"hydra_mlp.1.0.linear.weight": torch.zeros(WIDTH, 2 * WIDTH)}


def unequal(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return found | {"hydra_mlp.1.2.linear.weight": 1 + found["hydra_mlp.1.2.linear.weight"]}


DAMAGED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "sizes of several layers": ("lstm", None, {"inner_dim": "12.8"}, "inner_dim is '12.8'; it must be one number"),
    "sizes that are no numbers": ("lstm", None, {"emb_dim": "12.x"}, "emb_dim is '12.x'; it must be one number"),
    "another inner size": ("lstm", None, {"emb_dim": "16"}, "emb_dim is '16'; its tensors are 12 wide"),
    "an unknown method": ("lstm", None, {"method": "sum_gru"}, "it must be sum_rnn or sum_lstm"),
    "tied tables that differ": ("mlp", None, {"tie_weights": True}, "another table than the first, and tie_weights"),
    "a stage too many": ("mlp", None, {"n_predict": 4}, "n_predict is 4|emb.3.weight is missing"),
    "no norm": ("lstm", without("cell_ln.1.bias"), {}, "cell_ln.1.bias is missing"),
    "an exit without a projection": ("redrafter", None, {"exit_dim": 40}, "exit_dim is 40; .* no input_proj"),
    "a projection without an exit": ("redrafter, summed", None, {"exit_dim": 32}, "exit_dim is 32; .* an input_proj"),
    "a recurrence that is not there": ("redrafter, summed", None, {"rnn": True}, "rnn_u.weight is missing"),
    "a recurrence that is not wanted": ("redrafter", None, {"rnn": False}, "holds rnn_u.bias and 2 more"),
    "heads of attention": ("hydra", None, {"hydra_head_arch": "cross-attn"}, "heads of the kinds mlp and prefix-mlp"),
    "heads of EAGLE's attention": ("hydra", None, {"hydra_head_arch": "eagle-attn"}, "heads of the kinds mlp and"),
    "heads without tokens": ("hydra", None, {"grounded_heads": False}, "are Medusa's"),
    "a head that reads no token": ("hydra, rows", ungrounded, {}, "reads 16 channels, and heads 16 wide read 32"),
    "a head that reads a token too few": ("hydra, rows", narrow, {}, r"hydra_mlp.1.0.linear.weight has shape \[16, 32"),
    "blocks that are not one": ("hydra, rows", unequal, {}, "another table than the first, and Hydra says"),
    "a state beyond the target": ("hydra", None, {"hidden_state_offset": 9}, "must be known|the target has"),
    "more heads than tensors": ("hydra", None, {"hydra_num_heads": 4}, "hydra_mlp.3.0.linear.weight is missing"),
    "no sizes of the layer": ("hydra++", None, {"num_attention_heads": "-"}, "must be told"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_sentence(case: str, tmp_path: Path) -> None:
    kind, tensors, config, said = DAMAGED[case]
    written(kind, tmp_path)
    changed(tmp_path, tensors, **config)
    with pytest.raises(CheckpointError, match=said):
        load_head(str(tmp_path))


def test_heads_may_read_an_earlier_state(tmp_path: Path) -> None:
    written("hydra, rows", tmp_path)
    changed(tmp_path, hidden_state_offset=1)
    model = tiny_model(vocab=VOCAB)
    drafter: Any = load_head(str(tmp_path), target_layers=2)
    assert isinstance(drafter.network, Hydra) and drafter.needs.layers == (1,)
    changed(tmp_path, hidden_state_offset=3)
    with pytest.raises(CheckpointError, match="hidden_state_offset is 3; the target has 2 layers"):
        load_head(str(tmp_path), target_layers=2)
    changed(tmp_path, hidden_state_offset=1)
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    plain: Any = polydraft.generate(model, ROWS[0], drafter="none", **given)
    text: Any = polydraft.generate(model, ROWS[0], drafter=drafter, **given)
    assert torch.equal(text.sequences, plain.sequences)


@pytest.mark.parametrize("kind", WALKS)
def test_walks_draft_for_targets_with_recurrent_states(kind: str) -> None:
    """Such targets take chains alone, and nothing of a walk has to be taken back with their states."""
    model = tiny_model("qwen3_5")
    prompts = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.0}
    plain = polydraft.generate(model, prompts, drafter="none", **options)
    found = polydraft.generate(model, prompts, drafter=walk(kind), policy=Chain(3), **options)
    assert found.sequences.equal(plain.sequences) and found.statistics.drafted > 50
