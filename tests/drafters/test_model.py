"""A draft model's rows are its own next-token laws on each node's path, whatever the batch and the vocabulary."""

import pytest
import torch
from doubles import passes_of, plain_logits, step_of, tiny_model

import polydraft.drafters.model
from polydraft.drafters import DraftRequest, ModelDrafter, Session
from polydraft.errors import InvalidParameter, UnpairedScheme, VocabularyMismatch
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams, shortlist, to_probs
from polydraft.reading import Text
from polydraft.schemes import (
    IID,
    ConditionalPoisson,
    Coupled,
    Given,
    Product,
    Scheme,
    SpecHub,
    TopK,
    TopThenIID,
    TopThenSample,
    WithoutReplacement,
)
from polydraft.trees import EAGLE_25, Chain, Draft, Fixed, TreePolicy, TreeShape, Verdict, Widths
from polydraft.verifiers import BlockVerification, SpeculativeSampling, TopDown

VOCAB = 24
SHAPE = Fixed(TreeShape(((3,), (2, 0, 1), (1, 2))))
PARAMS = SamplingParams(temperature=0.8)
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8]]
SCHEMES: list[Scheme] = [
    IID(),
    WithoutReplacement(),
    TopK(),
    TopThenSample(),
    TopThenIID(1),
    ConditionalPoisson(),
    Coupled(),
    Product(),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda one: one.name)


def batch_of(rows: list[list[int]]) -> Text:
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), 64, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, lengths)


def path(draft: Draft, row: int, node: int) -> list[int]:
    nodes = draft.tree.ancestors[row, node, 1:].nonzero().squeeze(-1) + 1
    return draft.tree.tokens[row, nodes].tolist()


def check_rows(draft: Draft, rows: list[list[int]], drafter: ModelDrafter, vocab: int) -> int:
    """Compare every draft row with the model's plain pass over prompt and path; return how many were compared."""
    compared = 0
    model = drafter.model.model
    has_children = (draft.tree.children >= 0).any(dim=-1) & draft.tree.valid
    for row, node in has_children.nonzero().tolist():
        text = [min(token, model.config.vocab_size - 1) for token in rows[row] + path(draft, row, node)]
        size = draft.shortlist.shape[-1]
        tokens, probs = shortlist(plain_logits(model, text)[:vocab], drafter.params or PARAMS, size)
        assert draft.shortlist[row, node].tolist() == tokens.tolist()
        drawn_from = draft.probs[row, node]
        assert torch.allclose(drawn_from if drawn_from.dim() == 1 else drawn_from.squeeze(0), probs, atol=1e-10)
        compared += 1
    return compared


def start(drafter: ModelDrafter, text: Text, vocab: int = VOCAB):
    return drafter.start(text, Session(PARAMS, 64, vocab))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
@each_scheme
def test_rows_are_the_draft_models_own(kind: str, scheme: Scheme) -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model(kind, VOCAB)), shortlist_size=10)
    text = batch_of(ROWS)
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, scheme, SHAPE, Noise.from_seed(3, len(ROWS))))
    assert check_rows(draft, ROWS, drafter, VOCAB) == 5 * len(ROWS)


SAMPLED = [scheme for scheme in SCHEMES if not scheme.deterministic and not isinstance(scheme, Product)]


@pytest.mark.parametrize("scheme", SAMPLED, ids=lambda scheme: scheme.name)
def test_chains_of_sampled_drafts_come_from_the_whole_row(scheme: Scheme) -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)))
    text = batch_of(ROWS)
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, scheme, Chain(3), Noise.from_seed(3, len(ROWS))))
    assert draft.whole and torch.equal(draft.shortlist[:, :3], torch.arange(VOCAB).expand(len(ROWS), 3, -1))
    for row, prompt in enumerate(ROWS):
        for node in range(3):
            logits = plain_logits(drafter.model.model, prompt + path(draft, row, node))[:VOCAB]
            expected = to_probs(logits.unsqueeze(0), PARAMS)[0]
            assert torch.allclose(draft.probs[row, node], expected, atol=1e-10)


@pytest.mark.parametrize("own", [VOCAB - 5, VOCAB, VOCAB + 9])
def test_whole_rows_of_a_vocabulary_padded_to_another_size(own: int) -> None:
    """A draft model with fewer tokens than the target lists all of its own, which are not all of the target's."""
    drafter, rows = ModelDrafter(HuggingFaceModel(tiny_model("llama", own))), [[1, 2, 3]]
    text = batch_of(rows)
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, IID(), Chain(2), Noise.from_seed(3, 1)))
    assert draft.whole == (own >= VOCAB)
    assert torch.equal(draft.shortlist[0, 0], torch.arange(min(own, VOCAB)))
    target = torch.rand(1, 3, VOCAB, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    for verifier in (TopDown(SpeculativeSampling()), BlockVerification()):
        law = verifier.path_law(draft, target)
        token_law = law.next_token(draft, target)
        torch.testing.assert_close(token_law.sum(dim=-1), torch.ones(1, 3), check_dtype=False)
        assert verifier.verify(draft, target, Noise.from_seed(4, 1)).next_token.shape == (1,)


def test_what_is_cut_to_the_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, deterministic drafts, lists asked for, and rows of large vocabularies."""
    monkeypatch.setattr(polydraft.drafters.model, "LISTED", 12)
    text = batch_of(ROWS)

    def listed(drafter: ModelDrafter, scheme: Scheme, policy: TreePolicy) -> int:
        draft, _ = drafter.draft(
            start(drafter, text), DraftRequest(text, scheme, policy, Noise.from_seed(3, len(ROWS)))
        )
        assert draft.whole == (draft.shortlist.shape[-1] == VOCAB)
        return draft.shortlist.shape[-1]

    model = HuggingFaceModel(tiny_model("llama", VOCAB))
    free, bound = ModelDrafter(model), ModelDrafter(model, shortlist_size=9)
    assert listed(free, IID(), Chain(3)) == VOCAB
    assert listed(free, IID(), Widths((2, 1))) == 12
    assert listed(bound, IID(), Chain(3)) == listed(bound, IID(), Widths((2, 1))) == 9
    assert listed(free, TopK(), Chain(3)) == 1
    assert listed(free, TopK(), Widths((2, 1))) == 2
    monkeypatch.setattr(polydraft.drafters.model, "MOST_WHOLE", VOCAB - 1)
    assert listed(free, IID(), Chain(3)) == 12


def test_a_list_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="shortlist_size must be at least 1, or None, but is 0"):
        ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), shortlist_size=0)


def test_it_drafts_under_every_scheme_but_given() -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)))
    for scheme in (*SCHEMES, SpecHub()):
        drafter.check(scheme)
    with pytest.raises(UnpairedScheme, match=r"A draft model works with drafts that are .* or product, not given"):
        drafter.check(Given())


def test_pairs_around_a_hub() -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), shortlist_size=10)
    text = batch_of(ROWS)
    draft, _ = drafter.draft(
        start(drafter, text), DraftRequest(text, SpecHub(), Widths((2, 2)), Noise.from_seed(3, len(ROWS)))
    )
    assert check_rows(draft, ROWS, drafter, VOCAB) == 3 * len(ROWS)
    pairs = draft.drafted_atoms()[:, :3]
    assert bool((pairs == 0).any(dim=-1).all()), "the likeliest token, which is listed first, is in every pair"


def test_rows_stay_right_after_commits_of_different_lengths() -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), shortlist_size=VOCAB)
    rows = [list(row) for row in ROWS]
    text, noise = batch_of(rows), Noise.from_seed(5, len(rows))
    state = start(drafter, text)
    ends = [(0, 25, 7, 3), (25, 0, 1, 20), (20, 8, 0, 25)]
    for step, nodes in enumerate(ends):
        draft, state = drafter.draft(state, DraftRequest(text, WithoutReplacement(), Fixed(EAGLE_25), noise))
        assert draft.tree.valid.all()
        assert check_rows(draft, rows, drafter, VOCAB) >= 40
        paths = torch.full((len(rows), EAGLE_25.depth), -1)
        for row, node in enumerate(nodes):
            kept = draft.tree.ancestors[row, node, 1:].nonzero().squeeze(-1) + 1
            paths[row, : len(kept)] = kept
            rows[row] += [*path(draft, row, node), (row + step) % VOCAB]
        next_token = torch.tensor([row[-1] for row in rows])
        verdict = Verdict(paths, (paths >= 0).sum(dim=-1), next_token)
        state = drafter.commit(state, step_of(text, draft, verdict))
        text = batch_of(rows)


@pytest.mark.parametrize("own", [VOCAB - 5, VOCAB, VOCAB + 9])
def test_a_vocabulary_padded_to_another_size(own: int) -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", own)), shortlist_size=64)
    rows = [[VOCAB - 1, 2, VOCAB - 2], [1, VOCAB - 1]]
    text = batch_of(rows)
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, IID(), Widths((4, 3, 2)), Noise.from_seed(1, 2)))
    assert int(draft.shortlist.max()) == min(own, VOCAB) - 1
    assert check_rows(draft, rows, drafter, VOCAB) > 20


def test_another_vocabulary_is_refused_at_the_start() -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB + 1025)))
    with pytest.raises(VocabularyMismatch, match="The target has 24 tokens and the draft model 1049"):
        start(drafter, batch_of([[1, 2]]))


@each_scheme
def test_a_row_of_a_batch_is_drafted_as_if_alone(scheme: Scheme) -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)))
    text, noise = batch_of(ROWS), Noise.from_seed(11, len(ROWS))
    batched, _ = drafter.draft(start(drafter, text), DraftRequest(text, scheme, SHAPE, noise))
    for row, prompt in enumerate(ROWS):
        alone_text = batch_of([prompt])
        stream = Noise((Noise.from_seed(11, len(ROWS)).generators[row],))
        alone, _ = drafter.draft(start(drafter, alone_text), DraftRequest(alone_text, scheme, SHAPE, stream))
        assert alone.tree.tokens[0].tolist() == batched.tree.tokens[row].tolist()
        assert alone.atoms[0].tolist() == batched.atoms[row].tolist()
        assert torch.allclose(alone.probs[0], batched.probs[row], atol=1e-10)


def test_own_sampling_parameters_replace_the_targets() -> None:
    cold = SamplingParams(temperature=0.2, top_p=0.9)
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), VOCAB, cold)
    text = batch_of([[3, 1, 4]])
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, IID(), Chain(1), Noise.from_seed(0, 1)))
    expected = to_probs(plain_logits(drafter.model.model, [3, 1, 4]), cold)
    assert torch.allclose(draft.probs[0, 0], expected[draft.shortlist[0, 0]], atol=1e-10)


def test_a_text_longer_than_the_draft_models_context_is_drafted_for_all_the_same() -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("gpt2", VOCAB, n_positions=6)))
    text = batch_of([list(range(12))])
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, TopK(), Chain(3), Noise.from_seed(0, 1)))
    assert draft.tree.valid.all()


@each_scheme
def test_schemes_that_take_the_likeliest_tokens_list_no_more_than_that(scheme: Scheme) -> None:
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), shortlist_size=8)
    text = batch_of([[1, 2, 3]])
    draft, _ = drafter.draft(start(drafter, text), DraftRequest(text, scheme, Widths((2, 1)), Noise.from_seed(0, 1)))
    assert draft.shortlist.shape[-1] == (2 if scheme.deterministic else 8)


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("skipped", [1, 2, 5])
def test_steps_without_drafts_are_caught_up_with(skipped: int, idle: bool) -> None:
    """After steps that committed a token without a draft, the tree is that of a fresh state."""
    drafter = ModelDrafter(HuggingFaceModel(tiny_model("llama", VOCAB)), shortlist_size=8)
    rows = [[3, 1, 4, 1, 5], [7]]
    text, draft = batch_of(rows), Draft.nothing(batch_of(rows).last())
    state = start(drafter, text)
    if not idle:
        state = drafter.read(state, text, None)
        draft, state = drafter.draft(state, DraftRequest(text, IID(), Widths((2, 2)), Noise.from_seed(4, len(rows))))
    nothing = torch.zeros(len(rows), 0, dtype=torch.int64)
    for token in range(skipped):
        verdict = Verdict(nothing, torch.zeros(len(rows), dtype=torch.int64), torch.full((len(rows),), token + 9))
        state = drafter.commit(state, step_of(text, draft, verdict))
        rows = [[*row, token + 9] for row in rows]
        text, draft = batch_of(rows), Draft.nothing(batch_of(rows).last())
    with passes_of(drafter.model.model) as passes:
        asked = DraftRequest(text, IID(), Widths((2, 2)), Noise.from_seed(5, len(rows)))
        caught_up, state = drafter.draft(state, asked)
    assert len(passes) == 2, "what was missed is read in the root's pass"
    fresh, _ = drafter.draft(
        start(drafter, text), DraftRequest(text, IID(), Widths((2, 2)), Noise.from_seed(5, len(rows)))
    )
    assert caught_up.tree.tokens.tolist() == fresh.tree.tokens.tolist()
    assert torch.allclose(caught_up.probs, fresh.probs, atol=1e-12)
    kept = Verdict(torch.full((2, 2), -1), verdict.length, verdict.next_token)
    assert drafter.commit(state, step_of(text, caught_up, kept)).reader.read == text.counts
