"""A draft model that mends blocks of guesses: its rows, how guesses move on, and texts that stay the target's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import perturbed, step_of, tiny_model, tiny_tokenizer
from families import built
from sources import encoder_decoder
from torch import Tensor
from transformers import PreTrainedModel

import polydraft
from polydraft import Chain, Widths, rows
from polydraft.conformance import check
from polydraft.drafters import (
    ByDepthDrafter,
    Drafter,
    DraftRequest,
    JacobiBlockDrafter,
    LookupFirst,
    NgramDrafter,
    Session,
    drafter_of,
    merge_beside,
)
from polydraft.drafters.jacobi_block import JacobiBlockState
from polydraft.errors import CheckpointError, InvalidParameter, UnpairedScheme, UnsupportedModel
from polydraft.models import HuggingFaceModel
from polydraft.probs import Noise, SamplingParams, to_probs
from polydraft.reading import Text
from polydraft.schemes import IID, Given
from polydraft.trees import BestFirst, Draft, TreePolicy, Verdict

VOCAB, DEPTH, BLOCK = 24, 4, 6
PARAMS = SamplingParams(temperature=0.8)
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8]]


def module() -> PreTrainedModel:
    return tiny_model("llama", VOCAB, seed=4)


def text_of(texts: Sequence[Sequence[int]]) -> Text:
    tokens = torch.zeros(len(texts), 64, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(text) for text in texts]))


@torch.no_grad()
def rows_behind(text: Sequence[int], guesses: Sequence[int]) -> Tensor:
    """Return the logits behind the text and behind each guess, by a plain pass over both."""
    logits = module()(input_ids=torch.tensor([[*text, *guesses]])).logits[0]
    return logits[len(text) - 1 :]


def by_hand(text: Sequence[int], known: Sequence[int], passes: int = 1) -> tuple[Tensor, list[int]]:
    """Return the laws of the levels and the next guesses; a place without a guess takes the token `BLOCK` before."""
    whole = [*text[-BLOCK:], *known]
    first = len(whole) - len(known)
    while len(whole) < first + BLOCK:
        whole.append(whole[max(0, len(whole) - BLOCK)])
    guesses = whole[first : first + BLOCK]
    logits = torch.empty(0)
    for _ in range(passes):
        logits = rows_behind(text, guesses[: BLOCK - 1])
        guesses = logits.argmax(-1).tolist()
    return to_probs(logits, PARAMS), guesses


def drafted(own: JacobiBlockDrafter, state: JacobiBlockState, text: Text, seed: int) -> tuple[Draft, JacobiBlockState]:
    return own.draft(state, DraftRequest(text, IID(), Chain(DEPTH), Noise.from_seed(seed, len(text.counts))))


@pytest.mark.parametrize("passes", [1, 2])
def test_rows_and_guesses_are_those_of_plain_passes_over_steps_that_keep_some(passes: int) -> None:
    """What a step wrote, all of it counted, moves the guesses on; rows never depend on what was drawn above them."""
    own, texts = JacobiBlockDrafter(HuggingFaceModel(module()), BLOCK, passes), [list(row) for row in ROWS]
    state = own.start(text_of(texts), Session(PARAMS, 64, VOCAB))
    known: list[list[int]] = [[] for _ in texts]
    for step, kept in enumerate([(0, 4, 1, 2), (4, 0, 0, 4), (1, 2, 3, 0)]):
        text = text_of(texts)
        draft, state = drafted(own, state, text, step)
        for row, count in enumerate(kept):
            laws, known[row] = by_hand(texts[row], known[row], passes)
            own_rows = torch.zeros(DEPTH, VOCAB, dtype=torch.float64)
            own_rows.scatter_(-1, draft.shortlist[row, :DEPTH], draft.probs[row, :DEPTH].double())
            assert torch.allclose(own_rows, laws[:DEPTH].double(), atol=1e-9)
            known[row] = known[row][count + 1 :]
        paths = torch.full((len(texts), DEPTH), -1)
        for row, count in enumerate(kept):
            paths[row, :count] = torch.arange(1, count + 1)
            texts[row] += [*draft.tree.tokens[row, 1 : count + 1].tolist(), (row + step) % VOCAB]
        verdict = Verdict(paths, torch.tensor(kept), torch.tensor([one[-1] for one in texts]))
        state = own.commit(state, step_of(text, draft, verdict))
        assert state.reader.read == text.counts
        ends = [len(one) for one in texts]
        assert [list(one.behind(end)) for one, end in zip(state.guesses, ends, strict=True)] == known


def test_guesses_do_not_know_what_was_drawn() -> None:
    own, text = JacobiBlockDrafter(HuggingFaceModel(module()), 8), text_of(ROWS)
    first, second = (drafted(own, own.start(text, Session(PARAMS, 64, VOCAB)), text, seed) for seed in (1, 2))
    assert not torch.equal(first[0].tree.tokens, second[0].tree.tokens) and first[1].guesses == second[1].guesses


def test_rows_that_another_drafter_drafted_for_are_as_if_nobody_had_asked() -> None:
    own, text = JacobiBlockDrafter(HuggingFaceModel(module()), 8), text_of(ROWS)
    begun = own.start(text, Session(PARAMS, 64, VOCAB))
    draft, state = drafted(own, begun, text, 1)
    paths = torch.tensor([[1, 2, -1, -1]] * len(ROWS))
    step = step_of(text, draft, Verdict(paths, torch.tensor([2] * 4), torch.tensor([5] * 4))).only([0, 3])
    moved = own.commit(state, step)
    assert moved.guesses == (state.guesses[0], *begun.guesses[1:3], state.guesses[3]) and moved.before == ()
    assert moved.guesses[0].behind(len(ROWS[0]) + 3) == state.guesses[0].tokens[3:]
    assert rows.cut(moved, 0, 3).guesses[0].tokens == ()


OUTER: dict[str, Callable[[JacobiBlockDrafter], Drafter]] = {
    "alone": lambda own: own,
    "behind a lookup": lambda own: LookupFirst(own, trusted=1),
    "in a merge": lambda own: merge_beside(own),
    "by depth": lambda own: ByDepthDrafter((own, NgramDrafter()), (2, 2)),
}


@pytest.mark.parametrize("outer", OUTER)
def test_a_seeds_text_does_not_depend_on_its_neighbours(outer: str) -> None:
    """Whether a lookup answers, and how deep a merge drafts, hangs on all rows; what a row drafts must not."""
    target, own = near()
    prompts = [
        torch.tensor(one) for one in ([3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1, 4], [7, 2, 9], [5, 8, 1, 2, 6], [2, 7] * 3)
    ]
    options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 30, "eos_token_id": None, "seed": 3}
    options |= {"drafter": OUTER[outer](own), "policy": Chain(4), "top_k": 0}
    found = (
        {one.name: one.tokens for one in polydraft.generate_many(target, prompts, batch_size=size, **options)}
        for size in (1, 4)
    )
    alone, together = found
    assert alone == together


def near(scale: float = 0.05) -> tuple[PreTrainedModel, JacobiBlockDrafter]:
    target = tiny_model(vocab=VOCAB)
    return target, JacobiBlockDrafter(HuggingFaceModel(perturbed(target, scale)), 8)


POLICIES: dict[str, TreePolicy | None] = {
    "default": None,
    "chain": Chain(4),
    "deep": Chain(12),
    "widths": Widths((3, 2)),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_texts_are_those_of_plain_decoding(policy: str) -> None:
    """Alone, and in a running batch whose prompts are read in chunks; a tree may be deeper than the block."""
    target, own = near()
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 20, "eos_token_id": None}
    prompts = [torch.tensor(row) for row in ROWS]
    generate: Any = polydraft.generate
    plain = [generate(target, one[None], drafter="none", **options).sequences[0] for one in prompts]
    chosen: dict[str, Any] = {} if POLICIES[policy] is None else {"policy": POLICIES[policy]}
    for one, expected in zip(prompts, plain, strict=True):
        found: Any = polydraft.generate(target, one[None], drafter=own, **chosen, **options)
        assert torch.equal(found.sequences[0], expected) and found.statistics.accepted > 0
    many = polydraft.generate_many(target, prompts, drafter=own, batch_size=2, **chosen, **options)
    assert {text.name: text.tokens for text in many} == {
        name: text[len(ROWS[name]) :].tolist() for name, text in enumerate(plain)
    }


def test_sampled_texts_have_the_targets_law() -> None:
    """A right engine fails with probability 1e-6; texts take several steps, so that older guesses are read."""
    target: Any = tiny_model(vocab=4)
    own = JacobiBlockDrafter(HuggingFaceModel(perturbed(target, 0.2)), 3)

    def law(context: Sequence[int]) -> Any:
        with torch.no_grad():
            return target(input_ids=torch.tensor([list(context)])).logits[0, -1].softmax(-1).tolist()

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        given: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "top_k": 0, "eos_token_id": None}
        ids = torch.tensor(prompts)
        found: Any = polydraft.generate(target, ids, drafter=own, policy=Widths((2, 1)), seed=seeds[0], **given)
        return found.sequences[:, ids.shape[1] :].tolist()

    report = check(generate, law, [[1, 2]], batch_size=64, most_samples=512)
    assert report.passed, str(report)


def folder_of(folder: Path, **told: Any) -> Path:
    model = tiny_model("llama", len(tiny_tokenizer()), dtype=torch.float32)
    model.config.update(told)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_is_told_by_its_configuration(tmp_path: Path) -> None:
    pair = polydraft.load(folder_of(tmp_path / "target"), folder_of(tmp_path / "draft", jacobi_block=6))
    own = drafter_of(pair.draft)
    assert isinstance(own, JacobiBlockDrafter) and own.block == 6
    found: Any = polydraft.generate(pair.target, torch.tensor([[3, 1, 4]]), drafter=pair.draft, max_new_tokens=8)
    assert "jacobi-block" in found.statistics.sources
    for number, wrong in enumerate((0, "6", 10**9)):
        with pytest.raises(CheckpointError, match="jacobi_block is "):
            polydraft.load(tmp_path / "target", folder_of(tmp_path / f"wrong{number}", jacobi_block=wrong))


def test_wrong_values() -> None:
    model = HuggingFaceModel(module())
    for wrong in (0, True, 10**9):
        with pytest.raises(InvalidParameter, match=f"A block has 1 to .* but {wrong} are asked for"):
            JacobiBlockDrafter(model, wrong)
    with pytest.raises(InvalidParameter, match="passes must be at least 1, but is 0"):
        JacobiBlockDrafter(model, 4, 0)
    with pytest.raises(InvalidParameter, match="shortlist_size must be at least 1"):
        JacobiBlockDrafter(model, 4, shortlist_size=0)
    with pytest.raises(UnsupportedModel, match="Lfm2ForCausalLM cannot take back what it has read"):
        JacobiBlockDrafter(HuggingFaceModel(built("lfm2", {"layer_types": ["conv", "full_attention"] * 2})), 3)
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration reads with an encoder"):
        JacobiBlockDrafter(HuggingFaceModel(encoder_decoder("t5")), 3)
    with pytest.raises(UnpairedScheme, match="A draft model that fills blocks works with"):
        JacobiBlockDrafter(model).check(Given())


def test_what_suits_it_is_half_a_block_deep() -> None:
    own = JacobiBlockDrafter(HuggingFaceModel(module()), 16, 3)
    assert own.defaults(SamplingParams(temperature=0.0)).policy == BestFirst(8)
    assert own.defaults(SamplingParams()).policy == Chain(8) and own.needs.passes == 3
    assert JacobiBlockDrafter(own.model, 4).defaults(SamplingParams()).policy == Chain(4)
