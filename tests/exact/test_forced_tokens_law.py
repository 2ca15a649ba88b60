"""Tokens that a grammar forces: the law of the text stays, and a stretch of them takes one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from choices import HOT, Law, Toy, distance, law_of
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from polydraft import Chain, ModelDrafter, NoDraft, TopDown, Widths
from polydraft.drafters import Drafter
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop import forced
from polydraft.engine.loop.step import begin, step
from polydraft.models import Grammar
from polydraft.models.generation.processors import Stateless
from polydraft.models.grammar.grammar import vocabulary_of
from polydraft.models.grammar.masks import GrammarLogitsProcessor, RowMask
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Text
from polydraft.schemes import IID, Given, WithoutReplacement
from polydraft.trees import TreePolicy
from polydraft.trees.growing import BestFirst
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    NaiveMatch,
    Optimal,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    SharedNoise,
    TraversalVerification,
    TreeVerifier,
)

pytest.importorskip("llguidance")
SPELT, END, NEW, PROMPT, NEAR = ("a", "b", "<end>"), 2, 4, [1, 1, 0], 1e-6
WORDS = {
    "ab(a|b)": {"aba", "abb"},
    "(a|b)ba": {"aba", "bba"},
    "(aab|b)(ab|b)?": {"aab", "b", "aabab", "aabb", "bab", "bb"},
}
"""What is forced comes first, behind a choice, and behind some of the choices; with the end of the text behind it."""
TREES: list[tuple[TreeVerifier, TreePolicy, bool]] = [
    (TopDown(NaiveMatch(Given())), Chain(1), False),
    (TopDown(RecursiveRejection()), Widths((2, 1)), True),
    (BottomUp(RecursiveRejection()), BestFirst(3), True),
    (TopDown(Optimal()), Widths((2,)), True),
    (TopDown(RecursiveRejectionWithoutReplacement(WithoutReplacement())), Widths((2, 1)), True),
    (TraversalVerification(IID()), Chain(2), True),
    (BlockVerification(), Chain(2), True),
]
"""Rules with their trees, and whether anything is drafted."""
IDS = ["plain", "chosen one by one", "bottom up", "optimal", "without replacement", "traversal", "block"]


def spelling() -> PreTrainedTokenizerFast:
    made = Tokenizer(BPE(vocab={one: place for place, one in enumerate(SPELT)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


TOKENIZER = spelling()
EOS = frozenset((END,))


def mask(pattern: str) -> RowMask:
    vocabulary = vocabulary_of(TOKENIZER, len(SPELT))
    grammar = GrammarLogitsProcessor(vocabulary.start(Grammar.regex(pattern)), vocabulary)
    return grammar.placed([len(PROMPT)], EOS).rows[0]


def masked(target: Toy, words: set[str], new: int, path: Sequence[int] = ()) -> Law:
    """Return the law of masked decoding, token by token."""
    if not new:
        return {(): 1.0}
    text = "".join(SPELT[one] for one in path)
    may = [any(word.startswith(text + one) for word in words) for one in SPELT[:END]] + [text in words]
    kept = [chance * own for chance, own in zip(target.after([*PROMPT, *path]).tolist(), may, strict=True)]
    law: Law = {}
    for token in (token for token in range(len(SPELT)) if kept[token]):
        rest = {(): 1.0} if new == 1 or token == END else masked(target, words, new - 1, [*path, token])
        law |= {(token, *more): kept[token] / sum(kept) * share for more, share in rest.items()}
    return law


def drafter_of(drafts: bool) -> Drafter:
    return ModelDrafter(Toy(len(SPELT), 1)) if drafts else NoDraft()


@pytest.mark.long(3)
@pytest.mark.parametrize("pattern", WORDS)
@pytest.mark.parametrize(("rule", "policy", "drafts"), TREES, ids=IDS)
def test_the_law_is_that_of_masked_decoding(rule: TreeVerifier, policy: TreePolicy, drafts: bool, pattern: str) -> None:
    """Summed over all drafts, verdicts and tokens behind what is forced, in one step and what the target writes on."""
    target, words = Toy(len(SPELT), 0), WORDS[pattern]
    law, failures = law_of(
        target,
        drafter_of(drafts),
        rule,  # type: ignore[arg-type]
        policy,
        [PROMPT],
        NEW,
        steps=1,
        eos=EOS,
        processors=(Stateless(mask(pattern), "grammar"),),
        rest=lambda found, missing: masked(target, words, missing, found),
    )
    assert not failures and abs(sum(law.values()) - 1) < NEAR
    assert distance(law, masked(target, words, NEW)) < NEAR


class Wishful(RowMask):
    """Takes for forced what is not."""

    def forced(self, path: bytes, most: int) -> list[int]:
        return [0, 1][:most]


@pytest.mark.parametrize(("rule", "policy", "drafts"), TREES[::3], ids=IDS[::3])
def test_what_is_wrongly_taken_for_forced_changes_no_law(rule: TreeVerifier, policy: TreePolicy, drafts: bool) -> None:
    """The target's rows decide."""
    target, own = Toy(len(SPELT), 0), mask("(a|b){4}")
    words = {one + other for one in ("aa", "ab", "ba", "bb") for other in ("aa", "ab", "ba", "bb")}
    made = (Stateless(Wishful(own.walk, own.begin, [END], [False]), "grammar"),)
    law, _ = law_of(
        target,
        drafter_of(drafts),
        rule,  # type: ignore[arg-type]
        policy,
        [PROMPT],
        3,
        steps=1,
        eos=EOS,
        processors=made,
        rest=lambda found, missing: masked(target, words, missing, found),
    )
    assert distance(law, masked(target, words, 3)) < NEAR


@dataclass(frozen=True)
class Written:
    """What came of a text: its tokens, the passes, and how many tokens were forced."""

    tokens: tuple[int, ...]
    passes: int
    forced: int


def written(
    patterns: Sequence[str | None],
    method: Method,
    params: SamplingParams = HOT,
    seed: int = 0,
    new: int = 12,
    first: int = 0,
) -> list[Written]:
    """Write rows, each with its grammar, with the engine's own random numbers."""
    rows, target = len(patterns), Toy(len(SPELT), 0)
    laws = tuple(
        TargetLaw(params, () if one is None else (Stateless(mask(one), "grammar"),), eos=EOS) for one in patterns
    )
    text = Text(torch.tensor([PROMPT] * rows), torch.full((rows,), len(PROMPT)))
    streams = Noise(tuple(Noise.of_row(seed, first + row).generators[0] for row in range(rows)))
    batch = begin(target, method, Prompts(text, laws, (Ending(len(PROMPT) + new, eos=EOS),) * rows, streams))
    found = [Written((), 0, 0)] * rows
    while batch.going:
        batch, block, _ = step(batch)
        for row, gain in block.rows.items():
            one = found[row]
            found[row] = Written((*one.tokens, *gain.tokens), one.passes + 1, one.forced + gain.forced)
    return found


LONG = "(ab){4}(a|b)"
STRETCH = (0, 1) * 4


@pytest.mark.parametrize("params", [HOT, replace(HOT, temperature=0.0)], ids=["drawn", "greedy"])
def test_a_stretch_takes_one_pass(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight forced tokens and the choice behind them come of one pass, the forced end of the text of another."""
    plain = Method(NoDraft(), TopDown(NaiveMatch(Given())), Chain(1))
    for seed in range(8):
        (one,) = written([LONG], plain, params, seed)
        assert one.tokens[:8] == STRETCH and one.tokens[9:] == (END,)
        assert (one.passes, one.forced) == (2, 9)
    monkeypatch.setattr(forced, "MOST_FORCED", 0)
    (one,) = written([LONG], plain, params)
    assert (one.passes, one.forced) == (10, 0)


@pytest.mark.parametrize(("rule", "policy", "drafts"), TREES, ids=IDS)
def test_greedy_texts_stay_and_passes_are_no_more(
    rule: TreeVerifier, policy: TreePolicy, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, params = Method(drafter_of(drafts), rule, policy), replace(HOT, temperature=0.0)
    patterns = [*WORDS, LONG, "(a|bab|bbab){3}"]
    found = {one: written([one], method, params)[0] for one in patterns}
    monkeypatch.setattr(forced, "MOST_FORCED", 0)
    for one in patterns:
        (before,) = written([one], method, params)
        assert found[one].tokens == before.tokens and found[one].passes <= before.passes


def test_rows_of_a_batch_have_the_texts_that_they_have_alone() -> None:
    """Beside rows with other grammars, and without one."""
    method = Method(ModelDrafter(Toy(len(SPELT), 1)), BlockVerification(), Chain(2))
    patterns = [LONG, None, "(a|b)ba", "(aab|b)(ab|b)?"]
    for seed in range(6):
        together = written(patterns, method, seed=seed)
        for row, pattern in enumerate(patterns):
            assert together[row] == written([pattern], method, seed=seed, first=row)[0]


def test_a_seeds_text_is_the_same_by_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without drafts, with and without stretches: the noise is that of places in the text."""
    methods = [Method(drafter_of(drafts), SharedNoise(), Chain(2)) for drafts in (True, False)]
    patterns = ["(a|bab|bbab){3}", LONG]
    with_stretches = [
        [written([one], method, seed=seed)[0] for one in patterns for seed in range(8)] for method in methods
    ]
    monkeypatch.setattr(forced, "MOST_FORCED", 0)
    without = [[written([one], method, seed=seed)[0] for one in patterns for seed in range(8)] for method in methods]
    texts = [[one.tokens for one in found] for found in (*with_stretches, *without)]
    assert all(one == texts[0] for one in texts) and len(set(texts[0])) > 4
    assert sum(one.forced for one in with_stretches[1]) > 20


def test_a_text_ends_in_the_middle_of_a_stretch() -> None:
    plain = Method(NoDraft(), TopDown(NaiveMatch(Given())), Chain(1))
    (one,) = written([LONG], plain, new=5)
    assert one == Written(STRETCH[:5], 1, 5)
