"""Riders that draft: their rows by plain passes and by SPACE's own layout, texts, what a row keeps, what is refused."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from doubles import tiny_model
from torch import Tensor, nn

import polydraft
from polydraft import HuggingFaceModel, NaiveMatch, RecursiveRejection, TopDown
from polydraft.drafters import DraftRequest, LookupFirst, RiderDrafter, Session
from polydraft.drafters.model import draft_rows
from polydraft.drafters.rider_drafter import RiderState, likeliest_nodes
from polydraft.engine.loop.step import LOOP
from polydraft.errors import InvalidParameter, TargetMismatch, UnpairedScheme, UnsupportedModel, VocabularyMismatch
from polydraft.models import LanguageModel
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Step, Text
from polydraft.rows import cut
from polydraft.schemes import IID, Given, Product, TopK
from polydraft.trees import BestFirst, Chain, TreePolicy, Widths, in_pieces
from polydraft.verifiers import TreeVerifier

VOCAB, WIDTH, MASK = 24, 16, 5
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
GREEDY = SamplingParams(temperature=0)
HOT = SamplingParams()


def embeddings(count: int = 3, width: int = WIDTH) -> nn.Embedding:
    table = nn.Embedding(count, width, dtype=torch.float64).requires_grad_(False)
    table.weight.copy_(torch.randn(count, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
    return table


MAKERS: dict[str, Callable[..., RiderDrafter]] = {
    "one mask": lambda **named: RiderDrafter(masks=(MASK,) * 3, **named),
    "three masks": lambda **named: RiderDrafter(masks=(MASK, MASK + 1, MASK + 2), **named),
    "PaSS": lambda **named: RiderDrafter(lookahead=embeddings(), **named),
}


def text_of(rows: list[list[int]], room: int = 8) -> Text:
    tokens = torch.zeros(len(rows), room, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


@dataclass(frozen=True, eq=False)
class Watched(RiderDrafter):
    """Says what it was told."""

    seen: tuple[list[tuple[RiderState, Step]], ...] = ([],)
    sound = True

    def commit(self, state: RiderState, step: Step) -> RiderState:
        self.seen[0].append((state, step))
        return super().commit(state, step)


def watched(drafter: RiderDrafter, **named: Any) -> Watched:
    return Watched(drafter.masks, drafter.lookahead, seen=([],), **named)


def begun(
    target: LanguageModel, drafter: RiderDrafter, policy: TreePolicy, params: SamplingParams, rows: list[list[int]]
) -> Any:
    rule: TreeVerifier = TopDown(RecursiveRejection()) if params.temperature else TopDown(NaiveMatch(TopK()))
    return LOOP.begin(target, drafter, rule, policy, text_of(rows), Session(params, 90, target.facts.vocab_size))


def entering(model: Any, drafter: RiderDrafter, tokens: list[int]) -> Tensor:
    """Return what enters the first layer: tokens, then the riders behind them."""
    table = model.get_input_embeddings().weight
    own = table[list(drafter.masks)] if drafter.lookahead is None else drafter.lookahead.weight
    return torch.cat([table[tokens], own]).unsqueeze(0)


def path_of(step: Step, row: int, node: int) -> list[int]:
    found = list[int]()
    while node > 0:
        found, node = [int(step.tree.tokens[row, node]), *found], int(step.tree.parents[row, node])
    return found


@pytest.mark.long(6)
@pytest.mark.parametrize("carriers", [None, 20])
@pytest.mark.parametrize("policy", [Chain(3), Widths((3, 2)), BestFirst(7)], ids=repr)
@pytest.mark.parametrize("kind", MAKERS)
@torch.no_grad()
def test_riders_have_the_rows_of_a_plain_pass_and_draft_the_next_step(
    kind: str, policy: TreePolicy, carriers: int | None
) -> None:
    """Of every node with riders: a plain pass over the text, the node's path and its riders, and nothing else."""
    model: Any = tiny_model(vocab=VOCAB)
    drafter = watched(MAKERS[kind](), carriers=carriers)
    loop, drafts, kept = begun(HuggingFaceModel(model), drafter, policy, HOT, ROWS), 0, 0
    for _ in range(10):
        loop, step = LOOP.step(loop)
        state, told = drafter.seen[0][-1]
        assert state.carriers is not None and told.scored.riders is not None
        for row, count in enumerate(step.text.counts):
            written = step.text.tokens[row, :count].tolist()
            nodes = [int(one) for one in state.carriers[row] if one >= 0]
            assert nodes[0] == 0 and len(nodes) == min(drafter.most_carriers, int(step.tree.valid[row].sum()))
            for place, node in enumerate(nodes):
                plain = model(inputs_embeds=entering(model, drafter, written + path_of(step, row, node))).logits[0, -3:]
                torch.testing.assert_close(
                    told.scored.riders[row, 3 * place : 3 * place + 3], plain, rtol=1e-9, atol=1e-9
                )
        drafts, kept = drafts + step.tree.tokens.shape[1] - 1, kept + sum(step.verdict.kept)
        check_next(model, drafter, loop, step)
    assert drafts > 0 and kept > 0


def check_next(model: Any, drafter: RiderDrafter, loop: Any, step: Step) -> None:
    """Check what a state says of the next trees: a plain pass over each text but for its root, and riders."""
    state: RiderState = LOOP.drafts(loop)
    text = loop.text
    for row in state.known(text):
        tokens = text.tokens[row, : text.counts[row] - 1].tolist()
        plain = model(inputs_embeds=entering(model, drafter, tokens)).logits[0, -3:]
        torch.testing.assert_close(state.slots[row], plain, rtol=1e-9, atol=1e-9)
    draft, _ = drafter.draft(state, DraftRequest(text, IID(), Chain(4), Noise.from_seed(0, len(text.counts))))
    for piece in in_pieces(draft):
        for place, row in enumerate(piece.rows):
            if row in state.known(text):
                wanted = draft_rows(state.slots[row : row + 1, [0, 1, 2, 2]], state.params, None, IID())[1][0]
                torch.testing.assert_close(piece.draft.probs[place, :4], wanted)
            else:
                assert piece.draft.tree.tokens.shape[1] == 1


@torch.no_grad()
def test_the_layout_is_the_published_one() -> None:
    """SPACE's masks and positions, as its code makes them of a text, k masks, and k candidates with k masks each."""
    model: Any = tiny_model(vocab=VOCAB)
    drafter, k = watched(MAKERS["one mask"]()), 3
    loop = begun(HuggingFaceModel(model), drafter, Chain(k), GREEDY, ROWS[:1])
    for _ in range(4):
        loop, step = LOOP.step(loop)
        if step.tree.tokens.shape[1] == 1:
            continue
        written, candidates = step.text.tokens[0, : step.text.counts[0]].tolist(), step.tree.tokens[0, 1:].tolist()
        tokens = [*written, *[MASK] * k]
        for one in candidates:
            tokens += [one, *[MASK] * k]
        size, first = len(tokens), len(written)
        seen = torch.ones(size, size, dtype=torch.bool).tril()
        for start in range(first, size, k + 1):
            seen[start + k :, start : start + k] = False
        positions = seen.sum(-1) - 1
        added = torch.zeros(1, 1, size, size, dtype=torch.float64).masked_fill(~seen, -1e300)
        logits = model(torch.tensor([tokens]), attention_mask=added, position_ids=positions.unsqueeze(0)).logits[0]
        published = torch.cat([logits[start : start + k] for start in range(first, size, k + 1)])
        told = drafter.seen[0][-1][1].scored.riders
        assert told is not None and len(tokens) == first + k * (k + 2)
        torch.testing.assert_close(told[0], published, rtol=1e-9, atol=1e-9)
    assert any(step.tree.tokens.shape[1] > 1 for _, step in drafter.seen[0])


@pytest.mark.long(4)
@pytest.mark.parametrize("policy", [Chain(3), Chain(5), Widths((3, 2)), BestFirst(9)], ids=repr)
@pytest.mark.parametrize("carriers", [None, 2])
@pytest.mark.parametrize("kind", ["three masks", "PaSS"])
def test_greedy_text_is_plain_text_and_every_row_is_what_it_is_alone(
    kind: str, carriers: int | None, policy: TreePolicy
) -> None:
    target, drafter = tiny_model(vocab=VOCAB), MAKERS[kind](carriers=carriers)
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
    assert not together.statistics.fallback and together.statistics.accepted > 0


@pytest.mark.parametrize("kind", MAKERS)
def test_newcomers_to_a_running_batch_write_what_they_write_alone(kind: str) -> None:
    """They draft nothing in their first step, beside rows that do."""
    target, prompts = tiny_model(vocab=VOCAB), [*ROWS, [7, 7, 2, 1, 1, 1, 8, 3], [2, 4]]
    for heat in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
        named: dict[str, Any] = {"policy": Chain(3), "max_new_tokens": 11, **heat}

        def texts(size: int, drafter: RiderDrafter | str, named: dict[str, Any] = named) -> dict[Any, list[int]]:
            found = polydraft.generate_many(target, prompts, batch_size=size, drafter=drafter, **named)
            return {one.name: one.tokens for one in found}

        found = texts(2, MAKERS[kind]())
        assert found == texts(1, MAKERS[kind]())
        assert heat["temperature"] or found == texts(2, "none")


@pytest.mark.parametrize("carriers", [1, 2])
def test_where_the_accepted_node_had_no_riders_nothing_is_drafted(carriers: int) -> None:
    drafter = MAKERS["three masks"](carriers=carriers)
    loop = begun(HuggingFaceModel(tiny_model(vocab=VOCAB)), drafter, Chain(3), HOT, ROWS)
    kept = set[int]()
    for _ in range(20):
        before: RiderState = LOOP.drafts(loop)
        known = before.known(loop.text)
        loop, step = LOOP.step(loop)
        drafted = step.tree.valid.sum(-1) - 1
        assert [row for row in range(3) if drafted[row]] == known
        after: RiderState = LOOP.drafts(loop)
        assert after.known(loop.text) == [row for row in range(3) if step.verdict.kept[row] < carriers]
        assert step.scored.riders is not None and step.scored.riders.shape[1] <= drafter.needs.riders == 3 * carriers
        kept |= {*step.verdict.kept}
    assert max(kept) >= carriers


def state_after(drafter: RiderDrafter, steps: int = 2) -> tuple[RiderState, Text]:
    loop = begun(HuggingFaceModel(tiny_model(vocab=VOCAB)), drafter, Chain(3), HOT, ROWS)
    for _ in range(steps):
        loop, _ = LOOP.step(loop)
    return LOOP.drafts(loop), loop.text


def test_a_row_that_is_rewound_or_leaves_knows_nothing_and_another_text_begins_anew() -> None:
    state, text = state_after(MAKERS["PaSS"]())
    assert state.known(text) == [0, 1, 2] and state.carriers is None
    assert cut(state, 1, text.counts[1]).known(text) == [0, 1, 2]
    assert cut(state, 1, text.counts[1] - 1).known(text) == [0, 2] == cut(state, 1, 0).known(text)
    assert not callable(getattr(state, "resumes", None))


def test_nothing_rides_where_nothing_is_to_be_drafted_and_the_same_state_drafts_the_same() -> None:
    class Nothing(Chain):
        @property
        def shape(self) -> Any:
            return polydraft.TreeShape(())

    drafter = MAKERS["one mask"]()
    state, text = state_after(drafter)
    draft, after = drafter.draft(state, DraftRequest(text, IID(), Nothing(1), Noise.from_seed(0, 3)))
    assert [one.draft.riders for one in in_pieces(draft)] == [None] and after.carriers is None
    both = [drafter.draft(state, DraftRequest(text, IID(), Chain(3), Noise.from_seed(0, 3)))[0] for _ in range(2)]
    first, again = (in_pieces(one)[0].draft for one in both)
    assert torch.equal(first.tree.tokens, again.tree.tokens) and first.riders is not None and again.riders is not None
    assert torch.equal(first.riders.sees, again.riders.sees)


@pytest.mark.parametrize("scheme", [IID(), TopK(), Product()], ids=repr)
def test_the_likeliest_nodes_are_those_of_the_likeliest_paths(scheme: Any) -> None:
    drafter = MAKERS["three masks"]()
    state, text = state_after(drafter)
    drafted, _ = drafter.draft(state, DraftRequest(text, scheme, Widths((3, 2)), Noise.from_seed(1, 3)))
    (piece,) = in_pieces(drafted)
    draft, tree = piece.draft, piece.draft.tree
    for row, nodes in enumerate(likeliest_nodes(draft, 4).tolist()):
        chances = dict[int, float]({0: 2.0})
        for node in range(1, tree.tokens.shape[1]):
            if tree.valid[row, node]:
                above = int(tree.parents[row, node])
                law = draft.probs[row, above]
                law = law[int(tree.topology.rank[row, node]) % len(law)] if scheme.several_rows else law
                chances[node] = min(chances[above], 1.0) * float(law[int(draft.atoms[row, node])])
        best = sorted(chances, key=lambda node: -chances[node])[:4]
        assert nodes[0] == 0 and sorted(chances[one] for one in nodes) == pytest.approx(
            sorted(chances[one] for one in best)
        )


def test_lookups_may_go_before_riders() -> None:
    """In rows that took a lookup nothing rode, and the next step drafts nothing from riders."""
    target, prompt = tiny_model(vocab=VOCAB), [[3, 1, 4, 1, 5, 3, 1, 4], [9, 2, 6, 7, 7, 7, 7, 7]]
    drafter = LookupFirst(MAKERS["PaSS"](), trusted=1)
    for heat in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2}):
        given: dict[str, Any] = {"max_new_tokens": 24, **heat}
        found: Any = polydraft.generate(target, prompt, drafter=drafter, policy=Chain(3), **given)
        alone: Any = polydraft.generate(target, prompt[:1], drafter=drafter, policy=Chain(3), **given)
        assert found.sequences[0].tolist() == alone.sequences[0].tolist() and not found.statistics.fallback
        if not heat["temperature"]:
            plain: Any = polydraft.generate(target, prompt, drafter="none", **given)
            assert torch.equal(found.sequences, plain.sequences)


def test_riders_that_turn_into_no_numbers_cost_no_text() -> None:
    """Their keys spoil the root beside them, also where the tree is the root alone."""
    model, prompt = tiny_model(vocab=VOCAB), torch.tensor([[3, 1, 4]])
    plain = polydraft.generate(model, prompt, drafter="none", max_new_tokens=8, temperature=0.0)
    drafter = RiderDrafter(lookahead=embeddings())
    assert drafter.lookahead is not None
    drafter.lookahead.weight.data.fill_(torch.nan)
    with pytest.warns(RuntimeWarning, match="the rest is decoded without drafts"):
        found = polydraft.generate(model, prompt, drafter=drafter, max_new_tokens=8, temperature=0.0)
    assert found.sequences.equal(plain.sequences)


def test_a_row_without_a_law_goes_on_without_drafts_and_the_others_keep_theirs() -> None:
    target, drafter = HuggingFaceModel(tiny_model(vocab=VOCAB)), MAKERS["PaSS"]()
    loop, whole = (begun(target, drafter, Chain(3), GREEDY, ROWS) for _ in range(2))
    drafted = list[list[int]]()
    for number in range(6):
        if number == 2:
            state: RiderState = LOOP.drafts(loop)
            slots = state.slots.clone()
            slots[1] = torch.nan
            loop = LOOP.drafting(loop, replace(state, slots=slots))
            with pytest.warns(RuntimeWarning, match="the row that it proposed is no law|no law"):
                loop, step = LOOP.step(loop, mends=True)
        else:
            loop, step = LOOP.step(loop, mends=True)
        drafted.append((step.tree.valid.sum(-1) - 1).tolist())
        whole, _ = LOOP.step(whole)
    assert drafted == [[0, 0, 0], [3, 3, 3], *[[3, 0, 3]] * 4]
    for row in range(3):
        count = min(loop.text.counts[row], whole.text.counts[row])
        assert torch.equal(loop.text.tokens[row, :count], whole.text.tokens[row, :count])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (RiderDrafter, "give masks or lookahead"),
    "a number of masks": (lambda: RiderDrafter(masks=5), "masks must be token ids, but are 5"),
    "a number of embeddings": (lambda: RiderDrafter(lookahead=5), "lookahead must be an embedding, but is 5"),
    "a shortlist that is a word": (lambda: RiderDrafter((1,), shortlist_size="x"), "shortlist_size must be at least 1"),
    "both": (lambda: RiderDrafter((1,), embeddings()), "give masks or lookahead"),
    "a mask that is no token": (lambda: RiderDrafter((-1,)), r"masks must be token ids, but are \(-1,\)"),
    "no node": (lambda: RiderDrafter((1,), carriers=0), "carriers must be a number of nodes.* but is 0"),
    "no numbers": (
        lambda: RiderDrafter(lookahead=nn.Embedding.from_pretrained(torch.full((2, 4), torch.nan))),
        "lookahead holds values that are no numbers",
    ),
    "a shortlist": (lambda: RiderDrafter((1,), shortlist_size=0), "shortlist_size must be at least 1"),
}


@pytest.mark.parametrize(("make", "sentence"), REFUSED.values(), ids=[*REFUSED])
@pytest.mark.wrong_types
def test_bad_numbers(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidParameter, match=sentence):
        make()


def test_what_a_start_and_a_call_refuse() -> None:
    model, text = HuggingFaceModel(tiny_model(vocab=VOCAB)), text_of(ROWS)
    session = Session(HOT, 60, VOCAB, Reader.new(model, 3, 60))
    with pytest.raises(VocabularyMismatch, match="The mask is token 24 and the target has 24 tokens"):
        RiderDrafter((23, 24)).start(text, session)
    with pytest.raises(TargetMismatch, match="embeddings are 8 wide and the target's 16"):
        RiderDrafter(lookahead=embeddings(2, 8)).start(text, session)
    with pytest.raises(UnpairedScheme, match="A drafter of riders"):
        RiderDrafter((1,)).check(Given())
    ids = torch.tensor([[3, 1, 4]])
    with pytest.raises(UnsupportedModel, match=r"Bloom.* scores chains only, but riders needs tokens scored beside"):
        polydraft.generate(tiny_model("bloom", VOCAB), ids, drafter=RiderDrafter((1, 1)), max_new_tokens=4)
    with pytest.raises(InvalidParameter, match=r"riders needs 132 tokens scored beside .* context has 128"):
        polydraft.generate(tiny_model(vocab=VOCAB), ids, drafter=RiderDrafter((1,) * 11), max_new_tokens=4)
