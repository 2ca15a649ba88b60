"""The path terms of XPress and LiLiCorr: their formulas a second time, what is easily mistaken in them, and texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import IN_PLACE, LATTICE, VOCAB, WIDTH, block_drafter, block_head
from test_block_heads import ROWS, begun, session_for, text_of
from torch import Tensor
from torch.nn.functional import silu

import polydraft
from polydraft.drafters import DraftRequest, HeadDrafter
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.drafters.heads.drafter import HeadEnds, joined_states
from polydraft.drafters.heads.lilicorr import LatticeShape, LiLiCorr
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise
from polydraft.reading import Reader
from polydraft.rows import cut
from polydraft.schemes import TopK
from polydraft.trees import Chain, Frontier, Widths

MODEL: Any = tiny_model(vocab=VOCAB).double()
TARGET = HuggingFaceModel(MODEL)
EMBED, OUTPUT = MODEL.get_input_embeddings().weight.detach(), MODEL.get_output_embeddings().weight.detach()
FEWER = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 17, 20, 23])
PATHS = [[0, 1, 2, 1], [0, 1, 0, 1], [1, 0, 2, 0]]
"""Which of the likeliest tokens follows; they share beginnings, and the last is below the block."""


def xpress(own: dict[str, Tensor], slots: Tensor, prevs: Sequence[int], rows: Tensor, swap: str = "") -> Tensor:
    """Return the logits of the last of some slots, given the token before the one that each predicts.

    Args:
        slots: of the whole block.
        swap: a mistake to make.
    """
    mean = (slots[1:] if swap == "mean without the anchor's slot" else slots).mean(0)
    r, last = own["token_embed.weight"].shape[1], len(prevs) - 1
    parts = list[Tensor]()
    for slot, prev in enumerate(prevs):
        joined = [own["down_h.weight"] @ slots[slot], own["down_g.weight"] @ mean, own["token_embed.weight"][prev]]
        joined = [joined[1], joined[0], joined[2]] if swap == "mean before slot" else joined
        parts.append(own["in_proj.weight"] @ torch.cat(joined))
    x = torch.zeros(r, dtype=slots.dtype)
    for channel in range(r):
        for slot, part in enumerate(parts):
            row, column = (slot, last) if swap == "upper triangle" else (last, slot)
            x[channel] += own["mix_l"][channel, row, column] * part[channel]
    x = x if swap == "no residual" else x + parts[-1]
    gate, up = own["mlp_gate.weight"] @ x, own["mlp_up.weight"] @ x
    gate, up = (up, gate) if swap == "gate and up" else (gate, up)
    x = x + own["mlp_down.weight"] @ (silu(gate) * up)
    return rows @ slots[last] + own["readout.weight"] @ x


def rms(values: Tensor, weight: Tensor) -> Tensor:
    return weight * values / torch.sqrt((values**2).mean(-1, keepdim=True) + 1e-6)


def lattice(
    own: dict[str, Tensor], shape: LatticeShape, slots: Tensor, context: Tensor | None, rows: Tensor, swap: str = ""
) -> tuple[Tensor, list[dict[int, Tensor]], list[dict[int, Tensor]]]:
    """Return the anchor's vector, and the vectors of all candidates out of them and into them, by places of tokens.

    Args:
        slots: those that draft.
        context: the newest row of the context; None in a text of one token.
        rows: the output rows of the head's tokens, whose embeddings are the target's.
        swap: a mistake to make.
    """

    def through(name: str, values: Tensor) -> Tensor:
        return values @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    tokens = torch.arange(VOCAB) if len(rows) == VOCAB else FEWER
    states, places = list[Tensor](), list[tuple[int, int]]()
    for slot, hidden in enumerate(slots):
        logs = (rows @ hidden).log_softmax(-1)
        best = logs.argsort(descending=True)[: shape.candidates].tolist()
        if swap == "law of the candidates alone":
            logs = logs - logs[best].logsumexp(-1)
        for rank, place in enumerate(best):
            log = logs[place]
            said = [log, log.exp(), log - logs[best].max(), rank / (len(best) - 1), float(rank == 0)]
            features = torch.tensor([float(one) for one in said], dtype=slots.dtype)
            features = (features - features.mean()) / torch.sqrt(features.var(correction=0) + 1e-5)
            features = features * own["feature_mlp.0.weight"] + own["feature_mlp.0.bias"]
            state = through("token_proj", EMBED[tokens[place]]) + through("pass_hidden_proj", hidden)
            state = state + through("feature_mlp.3", silu(through("feature_mlp.1", features)))
            states.append(state + own["slot_embedding"][0, 0, slot, 0] + own["rank_embedding"][0, 0, 0, rank])
            places.append((slot, place))
    x, size = torch.stack(states), shape.width // shape.heads
    for layer in range(shape.layers):
        at = f"layers.{layer}."
        inside = rms(x, own[f"{at}attn_norm.weight"])
        joined = inside @ own[f"{at}attn.in_proj_weight"].T + own[f"{at}attn.in_proj_bias"]
        found = list[Tensor]()
        for head in range(shape.heads):
            q, k, v = (part[:, head * size : (head + 1) * size] for part in joined.chunk(3, -1))
            scores = q @ k.T / size**0.5
            for row, (mine, _) in enumerate(places):
                for column, (theirs, _) in enumerate(places):
                    far = theirs - mine if swap == "distance the other way round" else mine - theirs
                    scores[row, column] += own["relative_slot_bias"][head, far + len(slots)]
                    scores[row, column] += own["same_slot_bias"][head] * (mine == theirs)
            found.append(scores.softmax(-1) @ v)
        x = x + through(f"{at}attn.out_proj", torch.cat(found, -1))
        inside = rms(x, own[f"{at}mlp_norm.weight"])
        x = x + through(f"{at}mlp.2", silu(through(f"{at}mlp.0", inside)))
    x = rms(x, own["output_norm.weight"])
    if context is None:
        anchor = own["context_proj.bias"] * (swap == "bias without a row")
    else:
        anchor = through("context_proj", context)
    u = rms(anchor, own["anchor_norm.weight"])
    into, out = ([dict[int, Tensor]() for _ in slots] for _ in range(2))
    for state, (slot, place) in zip(x, places, strict=True):
        factors = silu(through("factor_input_proj", torch.cat([state, u, state * u])))
        for made, name in ((into, "in_head"), (out, "out_head")):
            vector = through(name, factors)
            made[slot][place] = vector / vector.norm().clamp_min(shape.vector_eps)
    start = through("anchor_out_head", u)
    return start / start.norm().clamp_min(shape.vector_eps), into, out


def matched(
    shape: LatticeShape, vector: Tensor, into: dict[int, Tensor], base: Tensor, swap: str = ""
) -> tuple[Tensor, Tensor]:
    """Return the candidates' places and their law, given the vector above them."""
    places = torch.tensor([*into])
    scores = torch.stack([vector @ into[place] for place in into]) * (1 if swap == "no scale" else shape.scale)
    scores = scores + base.log_softmax(-1)[places] * (swap == "log-probabilities added")
    return places, scores.softmax(-1)


def walked(drafter: HeadDrafter[Any], ranks: Sequence[int], state: Any) -> Iterator[tuple[list[list[int]], Tensor]]:
    """Walk down the likeliest tokens of these ranks: yield each row's tokens below its root, and the laws behind them.

    Tokens are the target's, laws are over the head's.
    """
    text, tokens = text_of(ROWS), torch.tensor([[row[-1]] for row in ROWS])
    named = torch.arange(VOCAB) if state.ends.tokens is None else state.ends.tokens
    grown, _ = drafter.network.root(state.memory, text, state.ends)
    paths: list[list[int]] = [[] for _ in ROWS]
    for depth, rank in enumerate([*ranks, 0]):
        above = torch.ones(len(ROWS), 1, depth + 1, dtype=torch.bool)
        laws = grown.logits(Frontier(range(depth, depth + 1), tokens, depth, above))[:, 0].softmax(-1)
        yield [[*path] for path in paths], laws
        tokens = named[laws.topk(3).indices[:, rank]].unsqueeze(-1)
        paths = [[*path, int(token)] for path, token in zip(paths, tokens, strict=True)]


def blocks(drafter: HeadDrafter[Any], back: int = 2) -> tuple[Any, list[Tensor], list[Tensor | None]]:
    """Return the state behind `ROWS`, each row's slots, and the row of its context so far from its end."""
    state, features = begun(TARGET, drafter, text_of(ROWS))
    assert features is not None
    filled = drafter.network.filled(state.memory, text_of(ROWS), state.ends)
    states, newest = joined_states(features, drafter.network.reads), list[Tensor | None]()
    for row, known in enumerate(ROWS):
        there = (features.places[row] == len(known) - back).nonzero()
        inside = drafter.network.fc.weight @ states[row, int(there[-1])] if len(known) > 1 else None
        newest.append(None if inside is None else rms(inside, drafter.network.hidden_norm.weight))
    return state, [*filled], newest


def of_few(term: str) -> HeadDrafter[Any]:
    return HeadDrafter(block_head(term, rows=len(FEWER)), HeadEnds(tokens=FEWER))


XPRESS_SWAPS = (
    "mean without the anchor's slot",
    "mean before slot",
    "upper triangle",
    "no residual",
    "gate and up",
    "the anchor before itself",
)


@pytest.mark.parametrize("shifted", [False, True], ids=["in place", "shifted"])
@pytest.mark.parametrize("few", [False, True], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("ranks", PATHS, ids=str)
def test_xpress_is_its_formula_on_every_path(ranks: list[int], few: bool, shifted: bool) -> None:
    drafter = of_few("xpress") if few else block_drafter("xpress")
    if shifted:
        drafter = HeadDrafter(block_head("xpress", shifted=True, rows=len(FEWER) if few else None), drafter.ends)
    own, rows = dict(drafter.network.path.named_parameters()), OUTPUT[FEWER] if few else OUTPUT
    state, slots, _ = blocks(drafter)
    for paths, laws in walked(drafter, ranks, state):
        for row, known in enumerate(ROWS):
            anchor = [*([] if shifted else [known[-2] if len(known) > 1 else known[-1]]), known[-1]]
            prevs = [*anchor, *paths[row]]
            prevs = prevs if len(prevs) <= 4 else [*prevs[:3], prevs[-1]]
            wanted = xpress(own, slots[row], prevs, rows).softmax(-1)
            torch.testing.assert_close(laws[row], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("swap", XPRESS_SWAPS)
def test_what_is_easily_mistaken_in_xpress_shows(swap: str) -> None:
    drafter = block_drafter("xpress")
    own = dict(drafter.network.path.named_parameters())
    state, slots, _ = blocks(drafter)
    found = [*walked(drafter, PATHS[0], state)]
    paths, laws = found[2]
    for row, known in enumerate(ROWS[:2]):
        before = known[-1] if swap == "the anchor before itself" else known[-2]
        wrong = xpress(own, slots[row], [before, known[-1], *paths[row]], OUTPUT, swap).softmax(-1)
        assert float((laws[row] - wrong).abs().max()) > 1e-4


def test_the_walk_at_temperature_0_is_where_jacobi_rounds_end() -> None:
    """Rounds begin with each slot's likeliest token; after as many as there are drafts they stand still at the walk."""
    late = 0
    for seed in range(4):
        drafter = block_drafter("xpress", seed=seed, block=6, spread=0.6)
        own = dict(drafter.network.path.named_parameters())
        state, slots, _ = blocks(drafter)
        asked = DraftRequest(text_of(ROWS), TopK(), Widths((1,) * 5), Noise.from_seed(1, len(ROWS)))
        walk = drafter.draft(state, asked)[0].tree.tokens[:, 1:]
        for row, known in enumerate(ROWS):
            before = [known[-2] if len(known) > 1 else known[-1], known[-1]]
            guesses, rounds = (slots[row][1:] @ OUTPUT.T).argmax(-1).tolist(), list[list[int]]()
            for _ in range(6):
                prevs = [*before, *guesses]
                guesses = [int(xpress(own, slots[row], prevs[:n], OUTPUT).argmax()) for n in range(2, 7)]
                rounds.append(guesses)
            assert rounds[4] == rounds[5] == walk[row].tolist()
            late += rounds[0] != rounds[4]
    assert late > 2  # some blocks need more rounds than one


LILICORR_SWAPS = (
    "law of the candidates alone",
    "distance the other way round",
    "bias without a row",
    "no scale",
    "log-probabilities added",
    "the row before the newest",
)


@pytest.mark.parametrize("few", [False, True], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("ranks", PATHS, ids=str)
def test_lilicorr_is_its_formula_on_every_path(ranks: list[int], few: bool) -> None:
    drafter = of_few("lilicorr") if few else block_drafter("lilicorr")
    own, rows = dict(drafter.network.path.named_parameters()), OUTPUT[FEWER] if few else OUTPUT
    named = FEWER.tolist() if few else [*range(VOCAB)]
    state, slots, newest = blocks(drafter)
    made = [lattice(own, LATTICE, slots[row][1:], newest[row], rows) for row in range(len(ROWS))]
    for paths, laws in walked(drafter, ranks, state):
        for row, (start, into, out) in enumerate(made):
            depth = len(paths[row])
            vector = out[min(depth, 3) - 1][named.index(paths[row][-1])] if depth else start
            places, wanted = matched(LATTICE, vector, into[min(depth, 2)], rows @ slots[row][1 + min(depth, 2)])
            torch.testing.assert_close(laws[row, places], wanted, rtol=1e-9, atol=1e-12)
            assert float(laws[row].sum()) == pytest.approx(1, abs=1e-12) and int((laws[row] > 0).sum()) == 5


@pytest.mark.parametrize("swap", LILICORR_SWAPS)
def test_what_is_easily_mistaken_in_lilicorr_shows(swap: str) -> None:
    drafter = block_drafter("lilicorr")
    own = dict(drafter.network.path.named_parameters())
    state, slots, context = blocks(drafter, 3 if swap == "the row before the newest" else 2)
    (_, first), (paths, second), *_ = walked(drafter, PATHS[0], state)
    row = 2 if swap == "bias without a row" else 0
    start, into, out = lattice(own, LATTICE, slots[row][1:], context[row], OUTPUT, swap)
    worst = 0.0
    for vector, laws, slot in ((start, first, 0), (out[0][paths[row][-1]], second, 1)):
        places, wrong = matched(LATTICE, vector, into[slot], OUTPUT @ slots[row][1 + slot], swap)
        worst = max(worst, float((laws[row, places] - wrong).abs().max()))
    assert worst > 1e-5


def test_a_token_that_is_no_candidate_makes_all_candidates_equally_likely() -> None:
    drafter = block_drafter("lilicorr")
    state, _ = begun(TARGET, drafter, text_of(ROWS))
    grown, _ = drafter.network.root(state.memory, text_of(ROWS), state.ends)
    roots = torch.tensor([[row[-1]] for row in ROWS])
    laws = grown.logits(Frontier(range(1), roots, 0, torch.ones(3, 1, 1, dtype=torch.bool))).softmax(-1)
    never = laws[:, 0].argmin(-1, keepdim=True)
    assert not laws[:, 0].gather(-1, never).any()
    below = grown.logits(Frontier(range(1, 2), never, 1, torch.ones(3, 1, 2, dtype=torch.bool))).softmax(-1)
    assert torch.allclose(below[below > 0], torch.tensor(0.2).double()) and int((below > 0).sum()) == 15


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="3 heads cannot share a width of 8"):
        replace(LATTICE, heads=3)


def test_as_many_candidates_as_tokens_are_all_of_them() -> None:
    """A head of 14 tokens that would take 20 of each slot has a law on all 14."""
    head = block_head("lilicorr", rows=len(FEWER))
    wide = BlockHead(head.shape, LiLiCorr(WIDTH, 3, replace(LATTICE, candidates=20))).double()
    drafter = HeadDrafter(wide.eval().requires_grad_(False), HeadEnds(tokens=FEWER))
    state, _ = begun(TARGET, drafter, text_of(ROWS))
    assert all(bool((laws > 0).all()) for _, laws in walked(drafter, PATHS[0], state))


@pytest.mark.parametrize("term", IN_PLACE)
def test_siblings_do_not_change_a_row(term: str) -> None:
    """A node's row is asked for beside a sibling's and without it."""
    drafter = block_drafter(term)
    state, _ = begun(TARGET, drafter, text_of(ROWS))
    (_, first), (paths, _), *_ = walked(drafter, PATHS[0], state)
    grown, _ = drafter.network.root(state.memory, text_of(ROWS), state.ends)
    roots = torch.tensor([[row[-1]] for row in ROWS])
    grown.logits(Frontier(range(1), roots, 0, torch.ones(3, 1, 1, dtype=torch.bool)))
    both = torch.cat([first.topk(3).indices[:, 2:], torch.tensor(paths)], dim=-1)
    seen = torch.eye(3, dtype=torch.bool)[1:] | torch.tensor([True, False, False])
    beside = grown.logits(Frontier(range(1, 3), both, 1, seen.expand(3, -1, -1)))[:, 1].softmax(-1)
    alone = [*walked(drafter, PATHS[0], state)][1][1]
    torch.testing.assert_close(beside, alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("term", IN_PLACE)
def test_what_is_read_in_pieces_is_what_is_read_at_once(term: str) -> None:
    drafter, whole, part = block_drafter(term), text_of(ROWS[:1]), text_of([ROWS[0][:3]])
    at_once, _ = begun(TARGET, drafter, whole)
    in_parts, _ = begun(TARGET, drafter, part)
    reader, _ = Reader.new(TARGET, 1, 64, drafter.needs.layers).catch_up(part)
    _, features = reader.catch_up(whole)
    in_parts = drafter.read(in_parts, whole, features)
    request = DraftRequest(whole, TopK(), Widths((2, 2, 1)), Noise.from_seed(1, 1))
    one, other = (drafter.draft(state, request)[0] for state in (at_once, in_parts))
    assert torch.equal(one.tree.tokens, other.tree.tokens)
    torch.testing.assert_close(one.probs, other.probs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("term", IN_PLACE)
def test_a_text_that_was_cut_to_one_token_is_drafted_for_as_a_fresh_one(term: str) -> None:
    """What was known of the token before a root is forgotten with it."""
    drafter, one = block_drafter(term), text_of([ROWS[0][:1]])
    cut_off = cut(begun(TARGET, drafter, text_of(ROWS[:1]))[0], 0, 1)
    fresh = drafter.start(one, session_for(TARGET, drafter))
    request = DraftRequest(one, TopK(), Widths((2, 1)), Noise.from_seed(1, 1))
    found, wanted = (drafter.draft(state, request)[0] for state in (cut_off, fresh))
    assert torch.equal(found.tree.tokens, wanted.tree.tokens) and torch.equal(found.probs, wanted.probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("term", IN_PLACE)
def test_heads_run_in_the_targets_precision(term: str, dtype: torch.dtype) -> None:
    drafter, target = block_drafter(term), tiny_model(vocab=VOCAB, dtype=dtype)
    drafter.network.to(dtype)
    given: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12, "seed": 3}
    found: Any = polydraft.generate(target, torch.tensor([ROWS[0]]), drafter=drafter, policy=Widths((2, 1)), **given)
    assert found.statistics.drafted > 0 and not found.statistics.fallback


@pytest.mark.parametrize("term", IN_PLACE)
def test_every_step_drafts_what_a_fresh_start_drafts(term: str) -> None:
    drafter, seen = block_drafter(term), list[tuple[Any, Any]]()

    class Watched(type(drafter)):  # type: ignore[misc]
        def draft(self, state: Any, request: DraftRequest) -> Any:
            found = super().draft(state, request)
            seen.append((replace(request, noise=Noise.from_seed(1, 1)), found[0]))
            return found

    given: dict[str, Any] = {"policy": Widths((2, 2, 1)), "temperature": 0.0, "max_new_tokens": 20}
    polydraft.generate(MODEL, torch.tensor([ROWS[0]]), drafter=Watched(drafter.network, drafter.ends), **given)
    assert len(seen) > 5
    for request, draft in seen:
        fresh, _ = begun(TARGET, drafter, request.text)
        again, _ = drafter.draft(fresh, request)
        assert torch.equal(again.tree.tokens, draft.tree.tokens)
        torch.testing.assert_close(again.probs, draft.probs, rtol=1e-7, atol=1e-9)


@pytest.mark.long(1)
@pytest.mark.parametrize("term", IN_PLACE)
def test_a_running_batch_is_its_texts(term: str) -> None:
    drafter, prompts = block_drafter(term), {place: torch.tensor(row) for place, row in enumerate([*ROWS, [9, 2]])}
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 12, "temperature": 1.0, "top_k": 0}
    found = [*polydraft.generate_many(MODEL, prompts, batch_size=2, seed=3, policy=Chain(3), **options)]
    assert len(found) == len(prompts) and sum(one.accepted for one in found) > 0
    for one in found:
        prompt = prompts[one.name].unsqueeze(0)  # type: ignore[index]
        alone: Any = polydraft.generate(MODEL, prompt, seed=one.seed, policy=Chain(3), **options)
        assert one.tokens == alone.sequences[0, prompt.shape[1] :].tolist()
