"""The law of a text whose grammar begins inside it: free before the mark, and masked decoding behind it."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from choices import Law, Toy, distance, law_of
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from polydraft import BottomUp, ByShape, Chain, ModelDrafter, SamplingParams, TopDown, Widths
from polydraft.engine import TargetLaw
from polydraft.models import Grammar
from polydraft.models.generation.processors import Stateless
from polydraft.models.grammar.grammar import vocabulary_of
from polydraft.models.grammar.late import LateGrammar
from polydraft.models.grammar.masks import GrammarLogitsProcessor
from polydraft.models.text.marks import Thinking
from polydraft.schemes import IID
from polydraft.trees import TreePolicy
from polydraft.verifiers import (
    BlockVerification,
    PathVerifier,
    RecursiveRejection,
    RecursiveRejectionWithoutReplacement,
    TraversalVerification,
)

pytest.importorskip("llguidance")
SPELT = ("<", ">", "a", ">a", "<>", "<end>")
END, NEW, NEAR = 5, 3, 1e-6
EOS = frozenset((END,))
PROMPT, LONGER = [2, 0, 1], [1, 0, 2, 1, 0]


def spelling() -> PreTrainedTokenizerFast:
    merges = [(">", "a"), ("<", ">")]
    made = Tokenizer(BPE(vocab={one: place for place, one in enumerate(SPELT)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


Making = Callable[[LateGrammar, int], Stateless]
TOKENIZER = spelling()
VOCABULARY = vocabulary_of(TOKENIZER, len(SPELT))


def late(pattern: str, mark: str, thinking: tuple[str, str] | None = None, **options: object) -> LateGrammar:
    return LateGrammar(Grammar.regex(pattern), mark, thinking=thinking and Thinking(*thinking), **options)  # type: ignore[arg-type]


TWO = late("a{1,2}|<", "<>")
"""Its mark is a token; two tokens; or two of which the second has text behind it, which is allowed."""
FORBIDDEN = late(">|>>", "<>")
"""The text behind the mark in the token `>a` is forbidden."""
THREE = late("a?", "<a>")
"""Its mark is three tokens, or three with text behind it."""
ANCHORED = replace(TWO, anchored=True)
THOUGHT = late("aa?|a>", "", ("<>", ">"))
"""Reasoning from `<>` to `>` may stand before a text of the grammar, which begins at once behind it."""
BEGUN = late("a>?", "", ("<<<", ">a"), begun=True)
BOUNDED = late("a{1,2}", "", ("<>", ">>"), most=1)
BOUNDED_MARK = late("a{1,2}", "<>", ("<a", "a>"), most=1)
NO_THOUGHT = late("a{1,2}", "<>", ("<", ">>"), begun=True, most=0)
ONLY_BOUNDED = LateGrammar(None, thinking=Thinking("<", ">>"), most=1)
GRAMMARS = [TWO, FORBIDDEN, THREE, ANCHORED, THOUGHT, BEGUN, BOUNDED, BOUNDED_MARK, NO_THOUGHT, ONLY_BOUNDED]


def language(own: LateGrammar, longest: int = 5) -> set[str]:
    if own.grammar is None:
        return set()
    words = ("".join(one) for size in range(longest + 1) for one in itertools.product("<>a", repeat=size))
    return {word for word in words if re.fullmatch(own.grammar.text, word)}


def rest_of(own: LateGrammar, text: str) -> tuple[str, str]:
    """Return where a text is, "before", "thinking" or "behind" the mark, and what stands there."""
    if own.thinking is not None:
        begin, end = ("" if own.begun else own.thinking.begin), own.thinking.end
        if text.startswith(begin):
            if end not in text[len(begin) :]:
                return "thinking", text
            text = text[len(begin) :].split(end, 1)[1]
        elif begin.startswith(text):
            return "opening", text
    if own.grammar is None:
        return "before", text
    if own.anchored:
        return ("behind", text[len(own.mark) :]) if text.startswith(own.mark) else ("before", text)
    if not own.mark:
        return "behind", text
    return ("behind", text.split(own.mark, 1)[1]) if own.mark in text else ("before", text)


def thoughts(own: LateGrammar, path: Sequence[int]) -> int:
    """Return how many tokens of a path stand behind the one with which reasoning began."""
    texts = ["".join(SPELT[one] for one in path[:size]) for size in range(len(path) + 1)]
    if own.begun:
        return len(path)
    return sum(rest_of(own, text)[0] == "thinking" for text in texts) - 1


def allowed(own: LateGrammar, words: set[str], path: Sequence[int]) -> set[int]:
    """Return the tokens that may follow a path, by its text."""
    text = "".join(SPELT[one] for one in path)
    where, rest = rest_of(own, text)
    if where == "thinking" and own.most is not None and thoughts(own, path) >= own.most and own.thinking is not None:
        closing = TOKENIZER(own.thinking.end, add_special_tokens=False)["input_ids"]
        return {closing[thoughts(own, path) - own.most]}
    found = {END} if (rest in words if where == "behind" else bool(own.mark) or own.grammar is None) else set()
    for token in range(END):
        after, more = rest_of(own, text + SPELT[token])
        if after != "behind" or any(word.startswith(more) for word in words):
            found.add(token)
    return found


def masked(
    target: Toy,
    own: LateGrammar,
    words: set[str],
    new: int,
    path: Sequence[int] = (),
    *,
    prompt: Sequence[int] = PROMPT,
    greedy: bool = False,
) -> Law:
    """Return the law of masked decoding, token by token; at temperature 0 where it is greedy."""
    if not new:
        return {(): 1.0}
    may = allowed(own, words, path)
    kept = [chance * (one in may) for one, chance in enumerate(target.after([*prompt, *path]).tolist())]
    if greedy:
        kept = [float(chance == max(kept)) for chance in kept]
    law: Law = {}
    for token in (token for token in range(len(SPELT)) if kept[token]):
        left = 0 if token == END else new - 1
        rest = masked(target, own, words, left, [*path, token], prompt=prompt, greedy=greedy)
        law |= {(token, *more): kept[token] / sum(kept) * share for more, share in rest.items()}
    return law


def processor(own: LateGrammar, begin: int = len(PROMPT)) -> Stateless:
    grammar = GrammarLogitsProcessor(own, VOCABULARY)
    return Stateless(grammar.placed([begin], EOS).rows[0], "grammar")


def tardy(own: LateGrammar, begin: int) -> Stateless:
    """Return the grammar's processor but for a fault: the first token behind the mark is free."""
    right = processor(own, begin)

    def wrong(history: Tensor, scores: Tensor) -> Tensor:
        before = ["".join(SPELT[one] for one in path[:-1]) for path in history[:, begin:].tolist()]
        free = torch.tensor([rest_of(own, text)[0] != "behind" for text in before])
        return torch.where(free.unsqueeze(-1), scores, right(history, scores.clone()))

    return Stateless(wrong, "tardy")


@pytest.mark.parametrize("own", GRAMMARS, ids=range(len(GRAMMARS)))
def test_every_path_has_its_tokens(own: LateGrammar) -> None:
    """All paths of up to three tokens, asked in any order and side by side, and some that go on from them."""
    made, words = processor(own), language(own)
    paths: list[tuple[int, ...]] = [()]
    seen = 0
    for depth in range(4):
        reached = [one for one in paths if len(one) == depth]
        if not reached:
            break
        order = torch.randperm(len(reached), generator=torch.Generator().manual_seed(depth)).tolist()
        history = torch.tensor([[*PROMPT, *reached[place]] for place in order])
        scores = torch.randn(len(order), len(SPELT), generator=torch.Generator().manual_seed(depth))
        found = made(history, scores.clone())
        for place, row, own_scores in zip(order, found, scores, strict=True):
            kept = row > -1e30
            assert {*kept.nonzero().flatten().tolist()} == allowed(own, words, reached[place]), reached[place]
            assert torch.equal(row[kept], own_scores[kept])
            paths += [(*reached[place], token) for token in sorted(allowed(own, words, reached[place]) - {END})]
            seen += 1
    assert seen > 3


CHAINS: list[tuple[PathVerifier, TreePolicy]] = [
    (TraversalVerification(IID()), Chain(2)),
    (BlockVerification(), Chain(2)),
]


@pytest.mark.long(2)
@pytest.mark.parametrize("own", [TWO, FORBIDDEN, THOUGHT, BOUNDED], ids=["two", "forbidden", "thought", "bounded"])
@pytest.mark.parametrize(("rule", "policy"), CHAINS, ids=["traversal", "block"])
def test_the_law_is_that_of_masked_decoding(rule: PathVerifier, policy: TreePolicy, own: LateGrammar) -> None:
    target, words, made = Toy(len(SPELT), 0), language(own), (processor(own),)

    def rest(found: list[int], missing: int) -> Law:
        return masked(target, own, words, missing, found)

    law, failures = law_of(
        target,
        ModelDrafter(Toy(len(SPELT), 1)),  # which knows nothing of the grammar
        rule,
        policy,
        [PROMPT],
        NEW,
        steps=1,
        eos=EOS,
        processors=made,
        rest=rest,
    )
    assert not failures and abs(sum(law.values()) - 1) < NEAR
    assert distance(law, masked(target, own, words, NEW)) < NEAR


class Marking(Toy):
    """A draft that likes the tokens of marks, and those that hold a part of one and text behind it."""

    def _logits(self, seen: Tensor) -> Tensor:
        return super()._logits(seen) + torch.tensor([1.0, 1.0, 0.5, 1.5, 1.5, -3.0], dtype=seen.dtype)


MARKS = {"token": TWO, "forbidden": FORBIDDEN, "three": THREE, "thought": THOUGHT, "bounded": BOUNDED}
BRANCHED: dict[str, PathVerifier] = {
    "top down": TopDown(RecursiveRejection()),
    "bottom up": BottomUp(RecursiveRejection()),
    "without replacement": TopDown(RecursiveRejectionWithoutReplacement()),
    "by shape": ByShape(),
}


def of_a_batch(own: LateGrammar, rule: PathVerifier, hot: tuple[int, int], made: Making = processor) -> tuple[Law, Law]:
    """Return the law of a step over trees in the first row of two that differ in length, and what it is to be.

    A mark of three tokens is completed at the third node of a path.
    """
    target, words, prompts, new = Toy(len(SPELT), 0), language(own), [LONGER, PROMPT], NEW + (own is THREE)
    policy = Widths((1, 1, 2) if own is THREE else (2, 1)) if sum(hot) == 1 else Widths((2,))
    laws = [
        TargetLaw(SamplingParams(temperature=one), (made(own, len(prompt)),), eos=EOS)
        for one, prompt in zip(hot, prompts, strict=True)
    ]

    def rest(found: list[int], missing: int) -> Law:
        return masked(target, own, words, missing, found, prompt=LONGER, greedy=not hot[0])

    drafter = ModelDrafter(Marking(len(SPELT), 1), shortlist_size=2, params=SamplingParams())
    law, failures = law_of(target, drafter, rule, policy, prompts, new, steps=1, eos=EOS, laws=laws, rest=rest)
    assert not failures
    return law, masked(target, own, words, new, prompt=LONGER, greedy=not hot[0])


@pytest.mark.long(4)
@pytest.mark.parametrize("hot", [(1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("rule", BRANCHED)
@pytest.mark.parametrize("mark", MARKS)
def test_the_law_of_trees_in_rows_of_different_lengths(mark: str, rule: str, hot: tuple[int, int]) -> None:
    """At temperature 0 and 1 beside each other."""
    law, expected = of_a_batch(MARKS[mark], BRANCHED[rule], hot)
    assert abs(sum(law.values()) - 1) < NEAR
    assert distance(law, expected) < NEAR


@pytest.mark.long(2)
@pytest.mark.parametrize(
    "mark", ["forbidden", *(pytest.param(one, marks=pytest.mark.slow) for one in ("thought", "three", "token"))]
)
def test_a_grammar_that_begins_one_token_late_is_caught(mark: str) -> None:
    law, expected = of_a_batch(MARKS[mark], BRANCHED["top down"], (1, 0), tardy)
    assert distance(law, expected) > 1e-3  # where the right one is within 1e-12


def test_the_reference_tells_laws_apart() -> None:
    target = Toy(len(SPELT), 0)
    laws = [masked(target, own, language(own), NEW) for own in (TWO, FORBIDDEN, THOUGHT, BOUNDED)]
    laws.append(target.texts(PROMPT, NEW, EOS))
    assert all(distance(one, other) > 0.001 for one, other in itertools.combinations(laws, 2))
