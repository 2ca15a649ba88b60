"""Stacks of drafters in batches: greedy texts, rows of ragged and running batches, the slots and passes they take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from doubles import OverOneCache, passes_of, perturbed, tiny_model
from key_views import few
from stacks import stacks

import polydraft
from polydraft import (
    BlockVerification,
    ByDepthDrafter,
    Chain,
    EnsembleDrafter,
    HuggingFaceModel,
    ModelDrafter,
    NestedDrafter,
    Recent,
)
from polydraft.drafters import Drafter, LookaheadDrafter, NgramDrafter, route_first
from polydraft.drafters.several.nested import MOST_LEVELS, levels
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop.step import begin, step
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import KeylessReader, Text
from polydraft.schemes import IID, Coupled, Product
from polydraft.verifiers import SharedNoise

VOCAB, ROWS = 24, [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [5]]


TARGET = tiny_model(vocab=VOCAB)
STACKS = stacks(TARGET)


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, ROWS))
    padded, mask = torch.zeros(len(ROWS), width).long(), torch.zeros(len(ROWS), width).long()
    for row, tokens in enumerate(ROWS):
        padded[row, width - len(tokens) :], mask[row, width - len(tokens) :] = torch.tensor(tokens), 1
    return padded, mask


@pytest.mark.long(4)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", STACKS)
def test_a_row_of_a_ragged_batch_is_the_text_that_it_is_alone(name: str, heat: float) -> None:
    padded, mask = left_padded()
    given: dict[str, Any] = {"drafter": STACKS[name], "temperature": heat, "seed": 3, "max_new_tokens": 24}
    found = polydraft.generate(TARGET, padded, attention_mask=mask, **given)
    assert found.statistics.accepted > 0 and not found.statistics.fallback
    if not heat:
        plain = polydraft.generate(TARGET, padded, attention_mask=mask, **given | {"drafter": "none"})
        assert torch.equal(plain.sequences, found.sequences)
    if name != "views of views":  # inside, keys are chosen anew at steps that are taken for slower neighbours too
        alone = polydraft.generate(TARGET, ROWS[0], **given).sequences
        assert found.sequences[0].tolist() == alone[0].tolist()


@pytest.mark.long(2)
@pytest.mark.parametrize("name", STACKS)
def test_rows_come_and_go_in_a_running_batch(name: str) -> None:
    """Others draft beside them, and a newcomer takes the place of a text that is over."""
    prompts = {number: row for number, row in enumerate([*ROWS, *ROWS, [7, 7, 7]])}
    given: dict[str, Any] = {"temperature": 0, "max_new_tokens": 14, "batch_size": 2}
    own = {number: {"drafter": STACKS[name]} for number in (0, 2, 3, 5)}
    plain = {one.name: one.tokens for one in polydraft.generate_many(TARGET, prompts, drafter="none", **given)}
    for options in ({"drafter": STACKS[name]}, {"drafter": "none", "per_prompt": own}):
        run = polydraft.generate_many(TARGET, prompts, **given, **options)
        texts = {one.name: one for one in run}
        assert {number: one.tokens for number, one in texts.items()} == plain and not run.statistics.fallback
        assert sum(texts[number].accepted for number in own)


@pytest.mark.long(2)
@pytest.mark.parametrize("name", STACKS)
def test_a_conversation_goes_on_from_what_was_read(name: str) -> None:
    given: dict[str, Any] = {"drafter": STACKS[name], "temperature": 1.0, "seed": 5, "max_new_tokens": 8}
    first = polydraft.generate(TARGET, ROWS[0], keep_past=True, **given)
    for cut in (0, 5):
        more = [*first.sequences[0].tolist()[: len(first.sequences[0]) - cut], 7, 2]
        fresh = polydraft.generate(TARGET, more, **given)
        again = polydraft.generate(TARGET, more, past=first.past, **given)
        assert fresh.sequences.tolist() == again.sequences.tolist() and again.statistics.prompt_known > 8


@pytest.mark.parametrize("name", ["over one cache", "views of views"])
def test_views_read_no_prompt_and_have_room_to_the_end_of_the_context(name: str) -> None:
    """The target reads the prompt, and every pass of a view is as wide as a tree of the loop inside at most."""
    drafter, prompt = STACKS[name], [*range(VOCAB)] * 4
    given: dict[str, Any] = {"temperature": 0, "max_length": 128}
    plain = polydraft.generate(TARGET, prompt, drafter="none", **given)
    view = drafter.middle.model.model if name == "over one cache" else TARGET
    with passes_of(view) as passes:
        found = polydraft.generate(TARGET, prompt, drafter=drafter, **given)
    assert found.sequences.tolist() == plain.sequences.tolist() and not found.statistics.fallback
    wide = [width for _, width in passes if width > 8]
    assert len(wide) == (0 if name == "over one cache" else 1), passes


def test_a_view_in_one_cache_has_slots_for_trees_that_are_larger_than_the_text_left() -> None:
    view = OverOneCache(model=HuggingFaceModel(perturbed(TARGET, 0.05)))
    drafter = NestedDrafter(view, ModelDrafter(HuggingFaceModel(TARGET)), BlockVerification(), Chain(30), 2)
    given: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
    plain = polydraft.generate(TARGET, ROWS[0], drafter="none", **given)
    found = polydraft.generate(TARGET, ROWS[0], drafter=drafter, **given)
    assert found.sequences.tolist() == plain.sequences.tolist() and not found.statistics.fallback


@pytest.mark.parametrize("name", ["over one cache", "views of views", "three levels"])
def test_between_drafts_a_loop_over_a_view_holds_no_keys(name: str) -> None:
    """They are the target's, whose rows come and go without it."""
    drafter = STACKS[name]
    prompt, law = Text(torch.tensor([ROWS[0]]), torch.tensor([len(ROWS[0])])), TargetLaw(SamplingParams())
    prompts = Prompts(prompt, (law,), (Ending(40),), Noise.from_seed(0, 1))
    batch = begin(HuggingFaceModel(TARGET), Method(drafter, BlockVerification(), Chain(4)), prompts)
    for _ in range(2):
        reader = batch.parts[0].state.loop.reader
        assert isinstance(reader, KeylessReader) == (name != "three levels")
        batch, _, taken = step(batch)
        assert taken.step.tree.tokens.shape[1] == 5


class Fails(NgramDrafter):
    """Fails in rows whose text is of a kind."""

    name = "fails"

    def guesses(self, state: Any, text: Text, bounds: Any) -> Any:
        if any(count > 20 for count in text.counts):
            raise OSError("no more")
        return super().guesses(state, text, bounds)


def test_a_member_that_fails_in_one_row_leaves_the_others_their_drafts() -> None:
    padded, mask = left_padded()
    drafter = ByDepthDrafter((STACKS["by depth"].members[0], Fails()), (2, 2))
    given: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "attention_mask": mask}
    with pytest.warns(RuntimeWarning, match="no more"):
        found = polydraft.generate(TARGET, padded, drafter=drafter, **given)
    plain = polydraft.generate(TARGET, padded, drafter="none", **given)
    assert torch.equal(found.sequences, plain.sequences) and found.statistics.accepted > 0


def test_shared_noise_writes_what_it_would_without_drafts() -> None:
    given: dict[str, Any] = {"verifier": SharedNoise(IID()), "temperature": 1.0, "seed": 4, "max_new_tokens": 12}
    plain = polydraft.generate(TARGET, ROWS[0], drafter="none", **given).sequences.tolist()
    for drafter in STACKS.values():
        assert polydraft.generate(TARGET, ROWS[0], drafter=drafter, **given).sequences.tolist() == plain


# --- What is refused -------------------------------------------------------------------------------------------------


def refusals() -> dict[str, tuple[str, Callable[[], Any]]]:
    model = HuggingFaceModel(TARGET)
    one, text = ModelDrafter(model), NgramDrafter()
    rule = BlockVerification()

    def tall(count: int) -> Drafter:
        return one if count == 1 else NestedDrafter(model, tall(count - 1), rule, Chain(1))

    heads: Any = LookaheadDrafter()
    return {
        "four levels": ("at most 3 drafters, but this one has 4", lambda: tall(MOST_LEVELS + 1)),
        "four levels by a member": (
            "at most 3",
            lambda: NestedDrafter(model, ByDepthDrafter((tall(MOST_LEVELS), text), (1, 1)), rule, Chain(1)),
        ),
        "no middle": ("must be a model, or a drafter with a view", lambda: NestedDrafter(text, one, rule, Chain(1))),  # type: ignore[arg-type]
        "no members": ("must be a tuple of drafters", lambda: ByDepthDrafter((), ())),
        "a list": ("must be a tuple of drafters", lambda: ByDepthDrafter([one], (1,))),  # type: ignore[arg-type]
        "no length": ("whole number of at least 1", lambda: ByDepthDrafter((one, text), (1,))),
        "length zero": ("whole number of at least 1", lambda: ByDepthDrafter((one, text), (1, 0))),
        "keys below": ("looks at the target's keys", lambda: ByDepthDrafter((one, few(Recent(1, 2))), (1, 1))),
        "riders": ("scored beside its drafts", lambda: ByDepthDrafter((heads, one), (1, 1))),
        "rows apart": ("drafts rows apart", lambda: ByDepthDrafter((route_first(one), text), (1, 1))),
    }


WRONG_TYPES = {"no middle", "a list"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.wrong_types] * (case in WRONG_TYPES)) for case in refusals()]
)
def test_what_cannot_be_stacked_is_refused(case: str) -> None:
    said, make = refusals()[case]
    with pytest.raises(InvalidParameter, match=said):
        make()


def test_schemes_that_fit_no_chain_of_several_are_refused() -> None:
    both = STACKS["by depth"]
    for scheme in (Coupled(), Product()):
        with pytest.raises(UnpairedScheme, match="chains of one row"):
            both.check(scheme)
    with pytest.raises(UnpairedScheme):
        ByDepthDrafter((EnsembleDrafter(((HuggingFaceModel(TARGET), None),)), NgramDrafter()), (1, 1)).check(
            BlockVerification().scheme
        )


def test_levels_are_counted_through_members() -> None:
    assert [levels(STACKS[name]) for name in ("by depth", "both", "three levels")] == [1, 2, 3]
