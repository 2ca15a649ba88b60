"""EAGLE's heads: their formulas, folders, drafting step by step, and the text's law."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles import tiny_model
from heads import rows_of
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import EAGLE_25, BestFirst, Chain, Eagle2, Fixed, Widths
from polydraft.catalogue import every_scheme
from polydraft.conformance import check
from polydraft.drafters import DraftRequest, Session
from polydraft.drafters.heads import drafter as drafter_of_heads
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds, HeadState
from polydraft.drafters.heads.eagle_head import Eagle1Head, Eagle3Head, Eagle3Norms, EagleHead
from polydraft.drafters.heads.sublayers import Anatomy
from polydraft.drafters.model import SAMPLED
from polydraft.errors import InvalidParameter, TargetMismatch, UnpairedScheme, VocabularyMismatch
from polydraft.models import HuggingFaceModel, linear_of
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Step, Text, reader_of
from polydraft.rows import cut, put
from polydraft.schemes import Given, Scheme, TopK
from polydraft.trees import Frontier, TreePolicy, Verdict
from polydraft.verifiers import BlockVerification, RecursiveRejection, TopDown

VOCAB, WIDTH = 24, 16
ANATOMY = Anatomy(width=WIDTH, inner=24, heads=4, groups=2, channels=6)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [4]]
TOKENS = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 11, 12, 15, 17, 20, 23])
VARIANTS = {
    "one": {},
    "one without bias": {"bias": False},
    "one of two layers": {"layers": 2},
    "one with norms": {"normed": True},
    "three": {"norms": Eagle3Norms()},
    "three of two layers": {"norms": Eagle3Norms(), "layers": 2},
    "residual": {"norms": Eagle3Norms(residual=True)},
    "recycled": {"norms": Eagle3Norms(output=True)},
    "joined": {"norms": Eagle3Norms(joined=True)},
    "sources": {"norms": Eagle3Norms(residual=True, output=True, sources=True)},
    "rows without a norm": {"norms": Eagle3Norms(rows=False)},
    "final": {"norms": Eagle3Norms(), "reads": ("final",)},
}
SCHEMES = [one for one in every_scheme() if isinstance(one, SAMPLED)]
MAIN = ("one", "three", "sources", "final")


def randomly(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Give all parameters random values, norms too."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in module.parameters():
            noise = torch.randn(value.shape, generator=stream, dtype=value.dtype)
            value.copy_(1 + scale * noise if value.dim() == 1 else scale * noise)


def head_of(name: str, anatomy: Anatomy = ANATOMY) -> EagleHead:
    settings: dict[str, Any] = dict(VARIANTS[name])
    reads = settings.pop("reads", (2, 1, 0))
    made = Eagle3Head(anatomy, reads, WIDTH, **settings) if "norms" in settings else Eagle1Head(anatomy, **settings)
    randomly(made)
    return made.double().eval()


def drafter_of(name: str, *, tokens: Tensor | None = TOKENS, **settings: Any) -> HeadDrafter[Any]:
    head = head_of(name)
    if isinstance(head, Eagle1Head):
        return HeadDrafter(head, HeadEnds(), **settings)
    rows = torch.nn.Linear(WIDTH, VOCAB if tokens is None else len(tokens), bias=False)
    randomly(rows, 1, 0.8)
    return HeadDrafter(head, HeadEnds(lm_head=rows.double(), tokens=tokens), **settings)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, num_hidden_layers=3)


# the formulas, written again


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states / torch.sqrt((states**2).mean(-1, keepdim=True) + 1e-6)


def by_hand_attention(read: Tensor, weights: dict[str, Tensor], places: Tensor, sees: Tensor) -> Tensor:
    """Return attention over one text: token by token, head by head, with complex rotations."""
    channels, heads, groups = 6, 4, 2
    angles = places.double()[:, None] * 10_000.0 ** -(torch.arange(0, channels, 2).double() / channels)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotated(name: str, count: int) -> Tensor:
        flat = (read @ weights[f"self_attn.{name}_proj.weight"].T).view(len(read), count, channels)
        complexes = torch.complex(flat[..., :3].contiguous(), flat[..., 3:].contiguous()) * turn[:, None]
        return torch.cat([complexes.real, complexes.imag], dim=-1)

    queries, keys = rotated("q", heads), rotated("k", groups)
    values = (read @ weights["self_attn.v_proj.weight"].T).view(len(read), groups, channels)
    rows = []
    for token in range(len(read)):
        parts = []
        for head in range(heads):
            scores = keys[:, head // 2] @ queries[token, head] / math.sqrt(channels)
            chances = scores.masked_fill(~sees[token], -math.inf).softmax(-1)
            parts.append(chances @ values[:, head // 2])
        rows.append(torch.cat(parts))
    return torch.stack(rows) @ weights["self_attn.o_proj.weight"].T


def by_hand_mlp(states: Tensor, weights: dict[str, Tensor]) -> Tensor:
    gate = states @ weights["mlp.gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (states @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def plain_layer(states: Tensor, own: dict[str, Tensor], places: Tensor, sees: Tensor) -> Tensor:
    read = rms(states, own["input_layernorm.weight"]) if "input_layernorm.weight" in own else states
    states = states + by_hand_attention(read, own, places, sees)
    return states + by_hand_mlp(rms(states, own["post_attention_layernorm.weight"]), own)


def by_hand(head: EagleHead, embedded: Tensor, hidden: Tensor, places: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a head makes of the pairs of one text, and what goes to the output head."""
    weights = dict(head.state_dict())
    if isinstance(head, Eagle1Head):
        if head.normed:
            embedded = rms(embedded, weights["embed_layernorm.weight"])
        states = torch.cat([embedded, hidden], -1) @ weights["fc.weight"].T + weights.get("fc.bias", 0)
        for layer in range(head.depth):
            states = plain_layer(states, part(weights, f"layers.{layer}."), places, sees)
        return states, rms(states, weights["lm_head_layernorm.weight"]) if head.normed else states
    assert isinstance(head, Eagle3Head)
    own = part(weights, "midlayer.")
    normed = rms(hidden, own["hidden_norm.weight"])
    pairs = torch.cat([rms(embedded, own["input_layernorm.weight"]), normed], -1)
    states = (normed if head.norms.residual else hidden) + by_hand_attention(pairs, own, places, sees)
    states = states + by_hand_mlp(rms(states, own["post_attention_layernorm.weight"]), own)
    for layer in range(head.depth - 1):
        states = plain_layer(states, part(weights, f"layers.{layer}."), places, sees)
    return states, rms(states, weights["norm.weight"]) if head.norms.rows else states


def fused_by_hand(head: EagleHead, features: Tensor) -> Tensor:
    weights = dict(head.state_dict())
    if isinstance(head, Eagle1Head) or "fc.weight" not in weights:
        return features
    assert isinstance(head, Eagle3Head)
    if head.norms.joined:
        features = rms(features, weights["input_norm.weight"])
    if head.norms.sources:
        parts = features.split(WIDTH, -1)
        features = torch.cat([rms(one, weights[f"fc_norm.{place}.weight"]) for place, one in enumerate(parts)], -1)
    return features @ weights["fc.weight"].T


def states_of(target: PreTrainedModel, head: EagleHead, tokens: Sequence[int]) -> Tensor:
    """Return the target's hidden states that a head reads, by an ordinary pass."""
    with torch.no_grad():
        found = target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([found[-1 if layer == "final" else layer][0] for layer in head.reads], -1)


def path_rows(target: PreTrainedModel, drafter: HeadDrafter[Any], text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Return the head's logits below a text and drafts on a path, by hand: recycled pairs one after the other."""
    head = drafter.network
    table, rows = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    rows = rows if drafter.ends.lm_head is None else drafter.ends.lm_head.weight
    hidden, tokens, found = fused_by_hand(head, states_of(target, head, text))[:-1], [*text[1:]], []
    with torch.no_grad():
        for draft in [*drafts, None]:
            count = len(hidden)
            places, sees = torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril()
            made, output = by_hand(head, table[tokens], hidden, places, sees)
            found.append(output[-1] @ rows.T)
            recycled = output[-1:] if isinstance(head, Eagle3Head) and head.norms.output else made[-1:]
            hidden = torch.cat([hidden, recycled])
            tokens = tokens if draft is None else [*tokens, draft]
    return torch.stack(found)


def text_of(rows: Sequence[Sequence[int]], room: int = 64) -> Text:
    tokens = torch.full((len(rows), room), 1)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(list(text))
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def begun(
    drafter: HeadDrafter[Any], target: PreTrainedModel, rows: Sequence[Sequence[int]], chunk: int | None = None
) -> tuple[HeadState, Any]:
    """Start and read prompts, at once or in chunks; return the state and the target's reader."""
    text = text_of(rows)
    reader = reader_of(HuggingFaceModel(target), len(rows), 64, drafter.needs.layers)
    state = drafter.start(text, Session(SamplingParams(), 64, VOCAB, reader))
    while any(read < count - 1 for read, count in zip(reader.read, text.counts, strict=True)):
        reader, features = reader.catch_up(text, chunk)
        seen = Text(text.tokens, torch.tensor(reader.read) + 1)
        state = drafter.read(state, seen, features)
    return state, reader


def rows_below(drafter: HeadDrafter[Any], state: HeadState, text: Text, drafts: Sequence[Sequence[int]]) -> Tensor:
    """Return the draft probabilities along given paths, all tokens in the order of their ids: the drafter's own."""
    with torch.no_grad():
        growing, _ = drafter.network.root(state.memory, text, state.ends)
        found, depth = [], len(drafts[0])
        for place in range(depth + 1):
            given = text.last() if place == 0 else torch.tensor([row[place - 1] for row in drafts])
            above = torch.ones(len(drafts), 1, place + 1, dtype=torch.bool)
            frontier = Frontier(range(place, place + 1), given.unsqueeze(-1), place, above)
            found.append(rows_of(growing, state, frontier))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_those_of_the_formulas(name: str, target: PreTrainedModel) -> None:
    drafter, drafts = drafter_of(name), [[5, 7, 2], [1, 0, 9]]
    rows = PROMPTS[:2]
    state, _ = begun(drafter, target, rows)
    found = rows_below(drafter, state, text_of(rows), drafts)
    for row, text in enumerate(rows):
        wanted = path_rows(target, drafter, text, drafts[row]).softmax(-1)
        torch.testing.assert_close(found[row].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("at_once", [512, 2])
def test_prompts_in_chunks_are_prompts(
    name: str, at_once: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, drafts = drafter_of(name), [[5, 7]] * 3
    whole = rows_below(drafter, begun(drafter, target, PROMPTS)[0], text_of(PROMPTS), drafts)
    monkeypatch.setattr("polydraft.drafters.heads.eagle_head.AT_ONCE", at_once)
    for chunk in (None, 1, 4):
        state, _ = begun(drafter, target, PROMPTS, chunk)
        torch.testing.assert_close(rows_below(drafter, state, text_of(PROMPTS), drafts), whole, atol=1e-6, rtol=0)


def stepped(
    drafter: HeadDrafter[Any], target: PreTrainedModel, rows: list[list[int]], policy: TreePolicy, steps: int
) -> HeadState:
    """Take steps of which some drafts are kept, each twice from the same state; the rows grow."""
    state, reader = begun(drafter, target, rows)
    for step in range(steps):
        text, noise = text_of(rows), Noise.from_seed(step, len(rows))
        drafter.draft(state, DraftRequest(text, TopK(), policy, noise))  # interrupted
        draft, after = drafter.draft(state, DraftRequest(text, TopK(), policy, noise))
        scored, reader = reader.score(text, draft.tree)
        path = torch.full((len(rows), policy.shape.depth), -1)
        for row in range(len(rows)):
            node = 0
            for depth in range((row + step) % 3):
                children = [one for one in draft.tree.children[row, node].tolist() if one >= 0]
                if not children:
                    break
                node = children[-1]
                path[row, depth] = node
            kept = [one for one in path[row].tolist() if one >= 0]
            rows[row] += [*draft.tree.tokens[row, kept].tolist(), (3 * row + step) % VOCAB]
        verdict = Verdict(path, (path >= 0).sum(-1), torch.tensor([row[-1] for row in rows]))
        reader = reader.keep(text, verdict)
        made = Step(text, draft.tree, scored, scored.logits.softmax(-1), verdict)
        drafter.commit(after, made)
        state = drafter.commit(after, made)
    return state


@pytest.mark.parametrize(
    "policy", [Widths((3, 2, 1)), Fixed(EAGLE_25), BestFirst(9)], ids=["widths", "leaves", "best first"]
)
@pytest.mark.parametrize("name", MAIN)
def test_steps_leave_what_a_fresh_start_makes(name: str, policy: TreePolicy, target: PreTrainedModel) -> None:
    drafter, rows = drafter_of(name), [list(row) for row in PROMPTS]
    state = stepped(drafter, target, rows, policy, 4)
    drafts = [[5, 7]] * 3
    fresh = rows_below(drafter, begun(drafter, target, rows)[0], text_of(rows), drafts)
    torch.testing.assert_close(rows_below(drafter, state, text_of(rows), drafts), fresh, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MAIN)
def test_rows_join_and_are_rewound(name: str, target: PreTrainedModel) -> None:
    drafter, rows = drafter_of(name), [list(row) for row in PROMPTS]
    state, drafts = stepped(drafter, target, rows, Chain(3), 3), [[5, 7]] * 3
    newcomer = [8, 8, 2, 0, 6]
    state = put(cut(state, 1, 0), 1, begun(drafter, target, [newcomer])[0])
    rows[1] = newcomer
    state = put(state, 3, begun(drafter, target, [newcomer[:3]])[0])
    rows.append(newcomer[:3])
    rows[0] = [*rows[0][:7], 20, 3]  # the states of six tokens or seven are known, those behind are another text's
    state = cut(state, 0, 7)
    assert state.memory.given[0] == 7 and state.memory.done[0] == 6
    known, _ = begun(drafter, target, rows)
    state.memory.states[0, 7:9] = known.memory.states[0, 7:9]
    state = replace(state, memory=replace(state.memory, given=(8, *state.memory.given[1:])))
    fresh = rows_below(drafter, known, text_of(rows), [*drafts, [5, 7]])
    found = rows_below(drafter, state, text_of(rows), [*drafts, [5, 7]])
    torch.testing.assert_close(found, fresh, atol=1e-5, rtol=0)
    assert state.resumes(known) and not state.resumes(begun(drafter_of(name), target, rows)[0])


@pytest.mark.long(2)
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize(
    "policy",
    [Widths((3, 2, 1)), Fixed(EAGLE_25), BestFirst(12), Eagle2(3, 4, 13)],
    ids=["widths", "leaves", "best", "eagle 2"],
)
def test_greedy_text_is_the_models(name: str, policy: TreePolicy, target: PreTrainedModel) -> None:
    drafter, options = drafter_of(name), {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    alone = [polydraft.generate(target, [row], drafter="none", **options).sequences[0].tolist() for row in PROMPTS]
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS])
    found = polydraft.generate(
        target, ids, attention_mask=mask, drafter=drafter, policy=policy, pad_token_id=0, **options
    )
    assert not found.statistics.fallback and found.statistics.drafted > 0
    for row, prompt in enumerate(PROMPTS):
        assert found.sequences[row, width - len(prompt) :].tolist() == alone[row]
    many = polydraft.generate_many(target, [*PROMPTS, PROMPTS[0][:5]], batch_size=2, drafter=drafter, **options)
    texts = {one.name: one.tokens for one in many}
    assert [texts[row] for row in range(3)] == [one[len(PROMPTS[row]) :] for row, one in enumerate(alone)]


def test_the_targets_own_states_draft_the_targets_text() -> None:
    """A target that maps tokens to tokens, and a head that does the same: every draft is kept."""
    target = tiny_model("llama", VOCAB, num_hidden_layers=3)
    head = Eagle1Head(ANATOMY)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for value in head.parameters():
            value.zero_()
        head.fc.weight[:, :WIDTH] = torch.eye(WIDTH)
        table = target.get_input_embeddings().weight
        table[0] = 1  # padding's, which is zero
        table.copy_(table / table.pow(2).mean(-1, keepdim=True).sqrt())  # the last norm changes nothing
    drafter = HeadDrafter(head.double(), HeadEnds())
    options = {"drafter": drafter, "policy": Chain(4), "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    found = polydraft.generate(target, [PROMPTS[0]], **options).statistics
    assert found.accepted == 16  # of 20 tokens one in five is the target's own


@pytest.mark.parametrize(
    "scheme", [one for one in every_scheme() if isinstance(one, SAMPLED)], ids=lambda one: one.name
)
@pytest.mark.parametrize("name", ["one", "three"])
def test_every_scheme(name: str, scheme: Scheme, target: PreTrainedModel) -> None:
    drafter = drafter_of(name)
    drafter.check(scheme)
    text = text_of(PROMPTS)
    state, _ = begun(drafter, target, PROMPTS)
    draft, _ = drafter.draft(state, DraftRequest(text, scheme, Widths((2, 1)), Noise.from_seed(0, 3)))
    assert draft.tree.valid[:, 0].all() and draft.tree.tokens.shape[1] == 5
    allowed = set(TOKENS.tolist()) if name == "three" else set(range(VOCAB))
    assert {*draft.tree.tokens[:, 1:][draft.tree.valid[:, 1:]].tolist()} <= allowed


def test_given_drafts_are_refused() -> None:
    with pytest.raises(UnpairedScheme, match="An EAGLE head works with"):
        drafter_of("one").check(Given())


@pytest.mark.long(2)
@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize(
    ("verifier", "policy"), [(BlockVerification(), Chain(2)), (TopDown(RecursiveRejection()), Widths((2, 1)))]
)
def test_sampled_text_has_the_targets_law(name: str, verifier: Any, policy: TreePolicy) -> None:
    """Sampled texts are consistent with the enumerated law; a right drafter fails with probability 1e-6."""
    target = tiny_model("llama", 5, num_hidden_layers=3)
    head = head_of(name)
    rows = torch.nn.Linear(WIDTH, 4, bias=False)
    randomly(rows, 1, 0.8)
    third = isinstance(head, Eagle3Head)
    ends = HeadEnds(lm_head=rows.double(), tokens=torch.tensor([0, 1, 3, 4])) if third else HeadEnds()
    drafter = HeadDrafter(head, ends)

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.0, "eos_token_id": None, "seed": seeds[0]}
        ids = torch.tensor(prompts)
        found = polydraft.generate(target, ids, drafter=drafter, verifier=verifier, policy=policy, **options)
        assert not found.statistics.fallback
        return found.sequences[:, len(prompts[0]) :].tolist()

    report = check(generate, target, [[1, 2, 3]], batch_size=64, most_samples=640, params=SamplingParams())
    assert report.passed, str(report)


def test_another_target_is_refused_in_one_sentence(target: PreTrainedModel) -> None:
    reader = reader_of(HuggingFaceModel(target), 1, 32, (1,))
    session = Session(SamplingParams(), 32, VOCAB, reader)
    text = text_of(PROMPTS[1:2])
    deep = HeadDrafter(Eagle3Head(ANATOMY, (2, 1, 9), WIDTH), HeadEnds())
    with pytest.raises(TargetMismatch, match=r"output of 9 layers and the target has 3"):
        deep.start(text, session)
    wide = HeadDrafter(Eagle1Head(Anatomy(width=32, inner=8, heads=2, groups=2, channels=4)), HeadEnds())
    with pytest.raises(TargetMismatch, match=r"32 wide and the target's are 16"):
        wide.start(text, session)
    many = HeadDrafter(head_of("three"), HeadEnds(tokens=torch.tensor([0, 99])))
    with pytest.raises(VocabularyMismatch, match="drafts 100 tokens and the target has 24"):
        many.start(text, session)
    with pytest.raises(InvalidParameter, match="there is no target"):
        deep.start(text, Session(SamplingParams(), 32, VOCAB))


def test_the_targets_rows_are_copied_once_for_a_head_and_anew_when_they_change(
    monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel
) -> None:
    made: list[Tensor] = []
    monkeypatch.setattr(drafter_of_heads, "linear_of", lambda rows: made.append(rows) or linear_of(rows))
    own: Any = copy.deepcopy(target)
    first, second = HeadEnds(tokens=TOKENS), HeadEnds(tokens=TOKENS[:9].clone())
    states = torch.randn(1, 2, WIDTH, dtype=own.dtype)

    def check_rows(ends: HeadEnds, count: int) -> None:
        found = ends.bound(HuggingFaceModel(own), WIDTH, own.dtype).output(states)
        assert torch.allclose(found, own.lm_head(states)[..., ends.get_buffer("tokens")]) and len(made) == count

    check_rows(first, 1)
    check_rows(first, 1)
    check_rows(second, 2)
    with torch.no_grad():
        own.lm_head.weight.data.mul_(-1)  # leaves place and version as they were
    check_rows(second, 3)
    with torch.no_grad():
        second.get_buffer("tokens")[0] += 1
    check_rows(second, 4)


def test_heads_draft_under_autocast(target: PreTrainedModel) -> None:
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    own: Any = copy.deepcopy(target).float()
    heads = [drafter_of(name) for name in MAIN]
    for head in heads:
        head.network.float(), head.ends.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = own.generate(ids, **options)
        for head in heads:
            assert torch.equal(polydraft.generate(own, ids, drafter=head, policy=3, **options).sequences, expected)
