"""The law of a text with a grammar, summed over all drafts and verdicts: masked decoding token by token."""

import re
from collections.abc import Sequence

import pytest
import torch
from choices import Law, Toy, distance, law_of
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from polydraft import Chain, ModelDrafter, TopDown, Widths
from polydraft.models import Grammar
from polydraft.models.generation.processors import Stateless
from polydraft.models.grammar.grammar import vocabulary_of
from polydraft.models.grammar.masks import GrammarLogitsProcessor
from polydraft.schemes import IID, WithoutReplacement
from polydraft.trees import TreePolicy
from polydraft.trees.growing import BestFirst, Confident
from polydraft.verifiers import (
    BlockVerification,
    BottomUp,
    ByShape,
    Optimal,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TraversalVerification,
)

pytest.importorskip("llguidance")
SPELT, END, NEW = ("a", "aa", "<end>"), 2, 3
PROMPT = [1, 2, 0]
PATTERNS = ["a{1,2}|a{4}", "(aaa)*a?", "aa|a{5}"]
"""Regular expressions, of which the second has texts of any length."""
TREES: list[tuple[PathVerifier, TreePolicy]] = [
    (TopDown(RecursiveRejection()), Widths((2, 1))),
    (BottomUp(RecursiveRejection()), BestFirst(3)),
    (TopDown(Optimal()), Widths((2,))),
    (TopDown(RecursiveRejectionWithoutReplacement()), Confident((2, 1), 0.4)),
    (TraversalVerification(IID()), Chain(2)),
    (BlockVerification(), Chain(2)),
    (ByShape(), Widths((2, 1))),
]
NEAR = 1e-6
"""Processors get scores in single precision."""


def spelling() -> PreTrainedTokenizerFast:
    made = Tokenizer(BPE(vocab={one: place for place, one in enumerate(SPELT)}, merges=[("a", "a")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


TOKENIZER = spelling()


def language(pattern: str, longest: int = 9) -> set[str]:
    """Return the texts that match, by Python's own regular expressions."""
    return {"a" * size for size in range(longest + 1) if re.fullmatch(pattern, "a" * size)}


def masked(target: Toy, texts: set[str], new: int, path: Sequence[int] = (), eos: Sequence[int] = (END,)) -> Law:
    """Return the law of masked decoding, token by token."""
    if not new:
        return {(): 1.0}
    so_far = "".join(SPELT[one] for one in path)
    words = {one: so_far + SPELT[one] for one in range(END)}
    allowed = {one: any(text.startswith(word) for text in texts) for one, word in words.items()}
    allowed |= {one: so_far in texts for one in eos}
    kept = [chance * allowed[one] for one, chance in enumerate(target.after([*PROMPT, *path]).tolist())]
    law: Law = {}
    for token in range(len(SPELT)):
        chance = kept[token] / sum(kept)
        if not chance:
            continue
        over = new == 1 or token in eos
        rest = {(): 1.0} if over else masked(target, texts, new - 1, [*path, token], eos)
        law |= {(token, *more): chance * share for more, share in rest.items()}
    return law


def processor(pattern: str, eos: frozenset[int] = frozenset((END,))) -> Stateless:
    vocabulary = vocabulary_of(TOKENIZER, len(SPELT))
    grammar = GrammarLogitsProcessor(vocabulary.start(Grammar.regex(pattern)), vocabulary)
    return Stateless(grammar.placed([len(PROMPT)], eos).rows[0], "grammar")


@pytest.mark.long(3)
@pytest.mark.parametrize("pattern", PATTERNS[:2])
@pytest.mark.parametrize(("rule", "policy"), TREES, ids=lambda one: getattr(one, "name", type(one).__name__))
def test_the_law_is_that_of_masked_decoding(rule: PathVerifier, policy: TreePolicy, pattern: str) -> None:
    target, eos = Toy(3, 0), frozenset((END,))
    drafter = ModelDrafter(Toy(3, 1))  # which knows nothing of the grammar
    texts, made = language(pattern), (processor(pattern),)

    def rest(found: list[int], missing: int) -> Law:
        return masked(target, texts, missing, found)

    law, failures = law_of(target, drafter, rule, policy, [PROMPT], NEW, steps=1, eos=eos, processors=made, rest=rest)
    expected = masked(target, texts, NEW)
    assert not failures
    assert abs(sum(law.values()) - 1) < NEAR
    assert distance(law, expected) < NEAR
    assert {text for text, chance in law.items() if chance > 1e-9} <= expected.keys()


def test_a_plain_draft_law_is_another_one() -> None:
    """The reference tells laws apart: without the grammar, and with another one, the distance is large."""
    target = Toy(3, 0)
    one, other = (masked(target, language(pattern), NEW) for pattern in PATTERNS[:2])
    assert distance(one, other) > 0.1
    assert distance(target.texts(PROMPT, NEW, frozenset((END,))), one) > 0.1


def test_the_answer_depends_on_the_history_alone() -> None:
    """Asked in any order, for any nodes together, after dead paths or not, the mask of a history is the same."""
    target, texts, made = Toy(3, 0), language(PATTERNS[0]), processor(PATTERNS[0])
    stream = torch.Generator().manual_seed(0)
    for _ in range(300):
        depth = int(torch.randint(5, (), generator=stream))
        paths = torch.randint(3, (int(torch.randint(1, 5, (), generator=stream)), depth), generator=stream)
        history = torch.cat([torch.tensor([PROMPT]).expand(len(paths), -1), paths], dim=-1)
        scores = torch.randn(len(paths), 3, generator=stream)
        found = made(history, scores.clone())
        for path, row, own in zip(paths.tolist(), found, scores, strict=True):
            word = "".join(SPELT[one] for one in path)
            if END in path or not any(text.startswith(word) for text in texts):
                assert torch.equal(row, own)
                continue
            law = masked(target, texts, 1, path)
            assert {place for place, score in enumerate(row.tolist()) if score > -1e30} == {one for (one,) in law}
            kept = row > -1e30
            assert torch.equal(row[kept], own[kept])


def test_the_law_of_several_steps() -> None:
    target, eos = Toy(3, 0), frozenset((END,))
    made = (processor(PATTERNS[0]),)
    law, _ = law_of(
        target, ModelDrafter(Toy(3, 1)), BlockVerification(), Chain(1), [PROMPT], 2, eos=eos, processors=made
    )
    assert distance(law, masked(target, language(PATTERNS[0]), 2)) < NEAR


def test_drawn_without_replacement_from_few_tokens() -> None:
    target, rule = Toy(3, 2), TopDown(RecursiveRejectionWithoutReplacement(WithoutReplacement()))
    law, _ = law_of(
        target,
        ModelDrafter(Toy(3, 5)),
        rule,
        Widths((2,)),
        [PROMPT],
        1,
        eos=frozenset((END,)),
        processors=(processor(PATTERNS[2]),),
    )
    assert distance(law, masked(target, language(PATTERNS[2]), 1)) < NEAR
