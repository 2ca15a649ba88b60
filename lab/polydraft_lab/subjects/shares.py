"""What verifying takes of a step of `generate`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from polydraft.catalogue import parse_policy
from polydraft.drafters import Drafter
from polydraft.engine import Statistics, as_drafter, stream, summed
from polydraft.engine.choices import default_policy
from polydraft.models import Pair
from polydraft.probs import SamplingParams
from polydraft.trees import Chain, Fixed, GrowingPolicy, TreePolicy, TreeShape
from polydraft.verifiers import TreeVerifier, most_drafts
from polydraft_lab.subjects.clock import Progress, one_thread, unseen
from polydraft_lab.subjects.rules import DEFAULT, RulesSettings


@dataclass(frozen=True)
class RuleShare:
    """A rule, a tree and a temperature: what verifying takes of a step, prompts left out.

    Args:
        rule: the rule's name, with that of its lift.
        scheme: that of its scheme.
        lossless: whether it is exact.
        tree: the tree as it was asked for.
        nodes: how many nodes it has at each depth, once no node has more children than the rule takes.
        temperature: of both models.
        verify_ms: milliseconds of verifying in a step.
        step_ms: milliseconds of a step.
        share: the former over the latter.
        block_efficiency: tokens per target call.
        steps: how many steps there were.
    """

    rule: str
    scheme: str
    lossless: bool
    tree: str
    nodes: tuple[int, ...]
    temperature: float
    verify_ms: float
    step_ms: float
    share: float
    block_efficiency: float
    steps: int


def measure_shares(
    rules: Sequence[TreeVerifier],
    pair: Pair,
    prompts: Sequence[Int[Tensor, "1 _"]],
    settings: RulesSettings,
    on_progress: Progress = unseen,
) -> Iterator[RuleShare]:
    """Generate with every rule, at all temperatures and with all trees, one text at a time and with one thread.

    Args:
        rules: the rules, as they verify trees.
        pair: target and draft model.
        prompts: what is continued.
        settings: temperatures, trees and lengths.
        on_progress: told of every result.
    """
    drafter = as_drafter(pair.draft)
    tasks = [(rule, heat, tree) for rule in rules for heat in settings.temperatures for tree in settings.trees]
    for done, (rule, temperature, tree) in enumerate(tasks, start=1):
        policy = tree_for(rule, tree, drafter, temperature)
        total = _generated(pair, prompts, settings, {"verifier": rule, "policy": policy, "temperature": temperature})
        steps = total.seconds["total"] - total.seconds["prefill"]
        yield RuleShare(
            rule=rule.name,
            scheme=rule.scheme.name,
            lossless=rule.lossless,
            tree=tree,
            nodes=tuple(sum(level) for level in policy.shape.counts),
            temperature=temperature,
            verify_ms=1e3 * total.seconds.get("verify", 0.0) / total.steps,
            step_ms=1e3 * steps / total.steps,
            share=total.seconds.get("verify", 0.0) / steps,
            block_efficiency=total.block_efficiency,
            steps=total.steps,
        )
        on_progress("shares", done, len(tasks))


def _generated(pair: Pair, prompts: Sequence[Tensor], settings: RulesSettings, options: dict[str, Any]) -> Statistics:
    """Continue every prompt, the first one twice: the first text warms up."""
    whole: dict[str, Any] = {"top_k": 0} if options["temperature"] else {}
    common = {**options, **whole, "drafter": pair.draft, "max_new_tokens": settings.max_tokens}
    with one_thread():
        runs = [
            stream(pair.target, ids, seed=settings.seed + number, time=True, **common).exhaust()
            for number, ids in enumerate([prompts[0], *prompts])
        ]
    return summed([run.statistics for run in runs[1:]])


def tree_for(rule: TreeVerifier, tree: str, drafter: Drafter, temperature: float) -> TreePolicy:
    """Return the tree with a name, none of whose nodes has more children than the rule takes.

    Raises:
        InvalidParameter: the name is none of a tree.
    """
    policy = default_policy(drafter, SamplingParams(temperature)) if tree == DEFAULT else parse_policy(tree)
    shape, most = policy.shape, most_drafts(rule)
    if shape.max_children <= most:
        return policy
    return Chain(shape.depth) if isinstance(policy, GrowingPolicy) else Fixed(narrowed(shape, most))


def narrowed(shape: TreeShape, most: int) -> TreeShape:
    """Return a shape with the first `most` children of each node only, and what is below those."""
    kept, children = set[int](), Counter[int]()
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        if parent < 0 or (parent in kept and rank < most):
            kept.add(node)
            children[parent] += 1
    counts = (tuple(children[node] for node in nodes if node in kept) for nodes in shape.levels)
    return TreeShape(tuple(level for level in counts if any(level)))
