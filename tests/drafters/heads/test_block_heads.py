"""Block heads: their formulas, written a second time; their cache; and the texts that come out of the engine."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from choices import distance, law_of
from doubles import tiny_model
from heads import IN_PLACE, TERMS, VOCAB, WIDTH, Seen, block_drafter, block_head, every_head, rows_of, slots_of
from torch import Tensor

import polydraft
from polydraft import (
    EAGLE_25,
    BestFirst,
    BlockVerification,
    BottomUp,
    Chain,
    Confident,
    Eagle2,
    ExpectedAcceptance,
    Fixed,
    NaiveMatch,
    Optimal,
    TopDown,
    Widths,
)
from polydraft.conformance import check
from polydraft.drafters import DraftRequest, Session
from polydraft.drafters.heads.block_head import BlockHead
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Reader, Text
from polydraft.schemes import IID, TopK, TopThenSample, WithoutReplacement
from polydraft.trees import Frontier
from polydraft.verifiers import RecursiveRejectionWithoutReplacement, TopThenSampleRule

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8]]


def rotated(heads: Tensor, places: Sequence[int], theta: float = 100.0) -> Tensor:
    """Turn pairs (i, i + h/2) of channels, one number after the other."""
    found, half = heads.clone(), heads.shape[-1] // 2
    for row, place in enumerate(places):
        for pair in range(half):
            angle = place * theta ** (-2 * pair / heads.shape[-1])
            a, b = heads[row, pair], heads[row, pair + half]
            found[row, pair] = a * math.cos(angle) - b * math.sin(angle)
            found[row, pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return found


def normed(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def by_hand(head: BlockHead, features: Tensor, query: Tensor, windows: Sequence[int | None] = (None, None)) -> Tensor:
    """Return the slots behind the last norm, by the formulas of the published code, a head and a slot at a time."""
    named = dict(head.state_dict())
    context = normed(features @ named["fc.weight"].T, named["hidden_norm.weight"])
    known, states = len(context), query
    places = [*range(known), *range(known, known + len(query))]
    for layer in range(head.shape.layers):
        at = {name.removeprefix(f"layers.{layer}."): one for name, one in named.items() if f"layers.{layer}." in name}
        inside = normed(states, at["input_layernorm.weight"])
        both = torch.cat([context, inside])
        parts = []
        for number in range(4):
            group = number // 2
            own, shared = slice(number * 4, number * 4 + 4), slice(group * 4, group * 4 + 4)
            queries = normed(inside @ at["self_attn.q_proj.weight"][own].T, at["self_attn.q_norm.weight"])
            keys = normed(both @ at["self_attn.k_proj.weight"][shared].T, at["self_attn.k_norm.weight"])
            values = both @ at["self_attn.v_proj.weight"][shared].T
            queries, keys = rotated(queries, places[known:]), rotated(keys, places)
            scores = queries @ keys.T / 2
            for slot, place in enumerate(places[known:]):
                for key in places:
                    late = bool(head.shape.causal) and head.shape.causal[layer] and key > place
                    far = windows[layer] is not None and abs(place - key) >= (windows[layer] or 0)
                    if late or far:
                        scores[slot, key] = -torch.inf
            parts.append(scores.softmax(-1) @ values)
        states = states + torch.cat(parts, -1) @ at["self_attn.o_proj.weight"].T
        inside = normed(states, at["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inside @ at["mlp.gate_proj.weight"].T)
        states = states + (gate * (inside @ at["mlp.up_proj.weight"].T)) @ at["mlp.down_proj.weight"].T
    return normed(states, named["norm.weight"])


def session_for(target: Any, drafter: Any, rows: int = 1) -> Session:
    reader = Reader.new(target, rows, 64, drafter.needs.layers)
    return Session(SamplingParams(), 64, target.vocab_size, reader)


def text_of(rows: Sequence[Sequence[int]]) -> Text:
    tokens = torch.zeros(len(rows), 48, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def begun(target: HuggingFaceModel, drafter: Any, text: Text) -> tuple[Any, Features | None]:
    """Return the drafter's state after the text was read at once, and what it read."""
    reader = Reader.new(target, len(text.lengths), 64, drafter.needs.layers)
    session = Session(SamplingParams(), 64, target.vocab_size, reader)
    _, features = reader.catch_up(text)
    return drafter.read(drafter.start(text, session), text, features), features


@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": (True, True)}, {"windows": (3, None), "causal": (True, False)}, {"windows": (3, 5)}],
    ids=["plain", "causal", "mixed", "windows"],
)
def test_slots_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    target = HuggingFaceModel(tiny_model(vocab=VOCAB))
    drafter = block_drafter("none", **changes)
    text = text_of(ROWS)
    state, features = begun(target, drafter, text)
    assert features is not None
    found = slots_of(drafter, state, text)
    for row, tokens in enumerate(ROWS):
        own = features.places[row] >= 0
        joined = torch.cat([features.states[layer][row, own] for layer in (0, 1, 2)], -1)
        query = target.embedded(torch.tensor([[tokens[-1], 1, 1, 1]]))[0]
        wanted = by_hand(drafter.network, joined, query, changes.get("windows", (None, None)))
        torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=1e-6)


def test_an_unshifted_block_drafts_from_the_slots_behind_its_anchor() -> None:
    target, text = HuggingFaceModel(tiny_model(vocab=VOCAB)), text_of(ROWS)
    shifted, plain = block_drafter("none"), block_drafter("none", shifted=False)
    every = slots_of(shifted, begun(target, shifted, text)[0], text)
    assert torch.equal(
        slots_of(plain, begun(target, plain, text)[0], text),
        every[:, 1:],
    )
    assert (shifted.network.shape.drafts, plain.network.shape.drafts) == (4, 3)


def test_convolutions_join_neighbouring_slots_and_begin_as_nothing() -> None:
    """DFlash2: y[i, c] = sum_t (base[t, c] + dynamic[i, t, group of c]) x[i - t, c], of the unconvolved norm."""
    fresh = BlockHead(block_head("none", taps=2, group=4).shape, block_head("none").path).double().eval()
    plain = BlockHead(block_head("none").shape, block_head("none").path).double().eval()
    plain.load_state_dict({name: one for name, one in fresh.state_dict().items() if "_conv" not in name})
    states, places = torch.randn(1, 4, WIDTH, dtype=torch.float64), torch.arange(4).unsqueeze(0)
    mask = [torch.ones(1, 4, 4, dtype=torch.bool)] * 2

    def run(head: BlockHead) -> Tensor:
        return head.slots(states, places, [lambda keys, values: (keys, values)] * 2, mask)

    torch.testing.assert_close(run(fresh), run(plain))
    conv = block_head("none", taps=2, group=4).layers[0].attention_conv  # type: ignore[union-attr]
    kernels = conv.kernels(states)[0]
    dynamic = (states @ conv.kernel_projection.weight.T)[0].view(4, 2, 2, 4)[:, 0]
    found = conv(states, kernels)[0]
    for slot in range(4):
        for channel in range(WIDTH):
            wanted = 0.0
            for tap in range(2):
                weight = conv.base_kernel[0, tap, channel] + dynamic[slot, tap, channel // 4]
                wanted += float(weight * states[0, slot - tap, channel]) if slot >= tap else 0.0
            assert float(found[slot, channel]) == pytest.approx(wanted, abs=1e-12)


def reference_logits(head: BlockHead, target: HuggingFaceModel, slots: Tensor, path: Sequence[int]) -> Tensor:
    """Return the logits after a path of tokens, the anchor first, by the published formulas."""
    named, depth = dict(head.path.state_dict()), len(path) - 1
    hidden = slots[min(depth, len(slots) - 1)]
    rows = target.model.get_output_embeddings().weight
    embedding = target.model.get_input_embeddings().weight
    kind, last = type(head.path).__name__, path[-1]
    if kind in ("Domino", "Mixing"):
        size = named["prefix_gru.weight_hh_l0"].shape[1]
        cell = torch.nn.GRU(WIDTH, size, bias=False, batch_first=True).double()
        cell.load_state_dict({name: named[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
        state = cell(embedding[list(path)].unsqueeze(0))[0][0, -1]
        joined = torch.cat([hidden, state])
        if kind == "Mixing":
            inside = torch.nn.functional.silu(named["mix.0.weight"] @ joined)
            return rows @ (hidden + named["mix.2.weight"] @ inside + named["mix.2.bias"])
        inside = torch.nn.functional.silu(named["embed_proj.0.weight"] @ joined)
        return rows @ hidden + (named["embed_proj.2.weight"] @ inside if depth else 0)
    base = rows @ hidden
    if kind == "Selector":
        best = base.topk(5).indices
        asked = named["predecessor_codebook"][last] * (named["hidden_projection.weight"] @ hidden)
        found = torch.full_like(base, -torch.inf)
        found[best] = base[best] + named["successor_codebook"][best] @ asked
        return found
    if kind == "PathTerm":
        return base
    first, second = named["markov_w1.weight"], named["markov_w2.weight"]
    if kind == "Markov":
        return base + second @ first[last]
    if kind == "GatedMarkov":
        gate = torch.sigmoid(named["gate_proj.weight"] @ torch.cat([hidden, first[last]]) + named["gate_proj.bias"])
        return base + second @ (gate * first[last])
    state = torch.zeros(6, dtype=torch.float64)
    for place, token in enumerate(path):
        joined = torch.cat([state, first[token], slots[min(place, len(slots) - 1)]])
        gate, new, out = (named["joint_proj.weight"] @ joined + named["joint_proj.bias"]).split(6)
        state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
    return base + second @ torch.tanh(out)


@pytest.mark.parametrize(
    "policy", [Widths((3, 2, 1)), Fixed(EAGLE_25), BestFirst(12)], ids=["widths", "leaves", "best first"]
)
@pytest.mark.parametrize("term", [term for term in TERMS if term not in IN_PLACE])
def test_the_row_of_every_node_is_that_of_its_path(term: str, policy: Any) -> None:
    """The draft row of a node is the formula's for the tokens above it, at every node, whatever the tree's shape."""
    target, text = HuggingFaceModel(tiny_model(vocab=VOCAB)), text_of(ROWS)
    drafter = block_drafter(term)
    state, _ = begun(target, drafter, text)
    slots = slots_of(drafter, state, text)
    draft, _ = drafter.draft(state, DraftRequest(text, WithoutReplacement(), policy, Noise.from_seed(5, 3)))
    tree, seen = draft.tree, 0
    for row, node in tree.valid.nonzero().tolist():
        if not float(draft.probs[row, node].sum()):
            continue
        path = [node]
        while (parent := int(tree.parents[row, path[0]])) >= 0:
            path.insert(0, parent)
        wanted = reference_logits(drafter.network, target, slots[row], tree.tokens[row, path].tolist()).softmax(-1)
        listed = draft.shortlist[row, node]
        there = listed >= 0
        ours = draft.probs[row, node][there].double()
        torch.testing.assert_close(ours, wanted[listed[there]] / wanted[listed[there]].sum(), rtol=1e-6, atol=1e-9)
        seen += 1
    assert seen > 9


@pytest.mark.parametrize("kind", every_head())
def test_a_start_records_no_gradients(kind: str) -> None:
    recorded = list[bool]()

    class Watched(HuggingFaceModel):
        def embedded(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
            recorded.append(torch.is_grad_enabled())
            return super().embedded(tokens, table)

    drafter = every_head()[kind]
    drafter.start(text_of(ROWS), session_for(Watched(tiny_model(vocab=VOCAB)), drafter, len(ROWS)))
    assert recorded and not any(recorded)


@pytest.mark.parametrize("term", ["markov", "gated", "recurrent"])
def test_a_confidence_head_is_told_the_slot_and_the_last_tokens_row(term: str) -> None:
    """sigmoid(w [h_i; W1[token]] + b) along a path (DeepSpec's `predict_confidence_step`), whatever the term keeps."""
    target, text = HuggingFaceModel(tiny_model(vocab=VOCAB)), text_of(ROWS)
    drafter = block_drafter(term)
    state, _ = begun(target, drafter, text)
    slots, table = (
        slots_of(drafter, state, text),
        drafter.network.path.state_dict()["markov_w1.weight"],
    )
    growing, read = drafter.network.root(state.memory, text, state.ends)[0], drafter.network.confidence
    assert read is not None and read.in_features == WIDTH + 6
    for depth, tokens in enumerate([[6, 1, 8], [2, 20, 2], [23, 0, 5], [9, 9, 1]]):
        above = torch.ones(3, 1, depth + 1, dtype=torch.bool)
        frontier = Frontier(range(depth, depth + 1), torch.tensor(tokens).unsqueeze(-1), depth, above)
        rows_of(growing, state, frontier)
        logits = torch.cat([slots[:, depth], table[tokens]], -1) @ read.weight[0] + read.bias
        torch.testing.assert_close(growing.overlap(frontier)[:, 0], 1 / (1 + torch.exp(-logits)))


@pytest.mark.parametrize("term", ["mixing", "recurrent", "selector"])
def test_what_is_drafted_after_many_steps_is_what_a_fresh_start_drafts(term: str) -> None:
    target, drafter = tiny_model(vocab=VOCAB), block_drafter(term)
    seen: list[tuple[list[list[int]], Any]] = []

    class Watched(type(drafter)):  # type: ignore[misc]
        def draft(self, state: Any, request: DraftRequest) -> Any:
            text = request.text
            found = super().draft(state, request)
            rows = [text.tokens[row, :count].tolist() for row, count in enumerate(text.counts)]
            seen.append((rows, slots_of(drafter, state, text)))
            return found

    watched = Watched(drafter.network, drafter.ends)
    padded, mask = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 8 - len(tokens) :], mask[row, 8 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"attention_mask": mask, "policy": Widths((2, 2, 1)), "temperature": 1.0, "seed": 4}
    polydraft.generate(target, padded, drafter=watched, max_new_tokens=20, **given)
    assert len(seen) > 5
    for rows, slots in seen:
        text = text_of(rows)
        fresh, _ = begun(HuggingFaceModel(target), drafter, text)
        going = [row for row, tokens in enumerate(rows) if len(tokens) < len(ROWS[row]) + 20]
        torch.testing.assert_close(slots_of(drafter, fresh, text)[going], slots[going], rtol=1e-8, atol=1e-8)


POLICIES = (
    Chain(4),
    Chain(6),
    Widths((3, 2, 1)),
    BestFirst(9),
    ExpectedAcceptance(9),
    Eagle2(3, 2, 8),
    Confident((2, 1, 1), 0.1),
)


@pytest.mark.long(3)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("term", TERMS)
def test_greedy_text_is_plain_text(term: str, policy: Any) -> None:
    target = tiny_model(vocab=VOCAB)
    padded, mask = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 8 - len(tokens) :], mask[row, 8 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "temperature": 0.0}
    wanted = polydraft.generate(target, padded, drafter="none", **given).sequences
    found = polydraft.generate(target, padded, drafter=block_drafter(term), policy=policy, **given)
    assert torch.equal(found.sequences, wanted)


def test_a_running_batch_is_its_texts() -> None:
    target, drafter = tiny_model(vocab=VOCAB), block_drafter("mixing")
    prompts = {place: torch.tensor(row) for place, row in enumerate([*ROWS, [5, 5, 5, 5], [9, 2], [4, 4, 1, 3, 7, 7]])}
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": 15, "temperature": 1.0, "top_k": 0}
    found = list(polydraft.generate_many(target, prompts, batch_size=2, seed=3, **options))
    assert len(found) == len(prompts) and sum(one.accepted for one in found) > 0
    for one in found:
        prompt = prompts[one.name].unsqueeze(0)  # type: ignore[index]
        alone = polydraft.generate(target, prompt, seed=one.seed, **options).sequences[0, prompt.shape[1] :]
        assert one.tokens == alone.tolist()


@pytest.mark.long(1)
@pytest.mark.parametrize(
    ("verifier", "policy"),
    [
        (BlockVerification(), Chain(3)),
        (BottomUp(Optimal(IID())), Widths((2, 2))),
        (TopDown(NaiveMatch(TopK())), BestFirst(6)),
    ],
    ids=["block", "optimal", "best first"],
)
def test_sampled_text_has_the_models_law(verifier: Any, policy: Any) -> None:
    """Sampled texts are consistent with the enumerated law; a right engine fails with probability 1e-6."""
    model, drafter = tiny_model(vocab=5), block_drafter("mixing", vocab=5)

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        found = polydraft.generate(
            model,
            torch.tensor(prompts),
            drafter=drafter,
            verifier=verifier,
            policy=policy,
            max_new_tokens=4,
            temperature=1.0,
            eos_token_id=None,
            seed=seeds[0],
        )
        return found.sequences[:, len(prompts[0]) :].tolist()

    report = check(generate, model, [[1, 2, 3]], batch_size=64, most_samples=1280, params=SamplingParams())
    assert report.passed, str(report)


RULES = [
    (BlockVerification(), Chain(3)),
    (BottomUp(Optimal(IID())), Widths((2, 1))),
    (BottomUp(Optimal(IID())), Confident((2, 1), 0.5)),
    (BottomUp(Optimal(IID())), BestFirst(4)),
    (TopDown(RecursiveRejectionWithoutReplacement(WithoutReplacement())), BestFirst(4)),
    (BottomUp(Optimal(IID())), ExpectedAcceptance(4)),
    (TopDown(RecursiveRejectionWithoutReplacement(WithoutReplacement())), ExpectedAcceptance(4, least=0.2)),
    (TopDown(TopThenSampleRule(TopThenSample())), Widths((2, 1))),
]


@pytest.mark.long(4)
@pytest.mark.parametrize(("rule", "policy"), RULES, ids=lambda one: getattr(one, "name", repr(one)))
@pytest.mark.parametrize("term", ["markov", "recurrent", "mixing", "selector"])
def test_the_law_of_the_text_is_the_targets(term: str, rule: Any, policy: Any) -> None:
    """Summed over all drafts and verdicts: rows that depend on drawn tokens cost no exactness."""
    target = Seen(2)
    drafter = block_drafter(term, vocab=2, width=4, block=3, anatomy={"heads": 2, "groups": 1, "channels": 2})
    law, failures = law_of(target, drafter, rule, policy, [[1, 0, 1]], 3, steps=1)
    assert not failures
    assert distance(law, target.texts([1, 0, 1], 3)) < 1e-12


def test_nothing_drawn_of_a_node_changes_its_own_row() -> None:
    """A node's row is asked for before its children are drawn, and follows from the tokens above it alone."""
    target, text = HuggingFaceModel(tiny_model(vocab=VOCAB)), text_of(ROWS[:1])
    drafter = block_drafter("mixing")
    state, _ = begun(target, drafter, text)
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Widths((2, 2, 1)), Noise.from_seed(1, 1)))
    other, _ = drafter.draft(state, DraftRequest(text, IID(), Widths((2, 2, 1)), Noise.from_seed(2, 1)))
    torch.testing.assert_close(draft.probs[0, 0], other.probs[0, 0])
