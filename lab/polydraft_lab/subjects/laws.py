"""What a node rule's law costs, at one node and in a batch, and what it accepts beside its scheme's optimum."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from polydraft.probs import Noise
from polydraft.schemes import Scheme
from polydraft.theory import optimal_set
from polydraft.verifiers import NodeVerifier
from polydraft_lab.limits import NodeCase
from polydraft_lab.subjects.clock import Progress, one_thread, own_milliseconds, unseen
from polydraft_lab.subjects.rows import Rows, rows_for
from polydraft_lab.subjects.rules import RulesSettings

BATCHES, TURNS = 5, 3
"""How often the law of a batch is timed, and that of each single node."""


@dataclass(frozen=True)
class RuleLaw:
    """A rule, a number of drafts and a temperature: milliseconds and probabilities.

    Args:
        rule: the rule's name.
        scheme: that of its scheme.
        lossless: whether it is exact.
        drafts: drafts at the node.
        temperature: of both models.
        node_ms: the law of one node, the median over nodes.
        slowest_ms: that of the dearest node.
        batch_ms: the laws of all nodes at once.
        nodes: how many nodes.
        acceptance: the mean over positions, computed; None where it is too dear to compute.
        optimum: the mean of what the scheme allows.
        positions: how many positions.
    """

    rule: str
    scheme: str
    lossless: bool
    drafts: int
    temperature: float
    node_ms: float
    slowest_ms: float
    batch_ms: float
    nodes: int
    acceptance: float | None
    optimum: float
    positions: int


def measure_laws(
    rules: Sequence[NodeVerifier], rows: Sequence[Rows], settings: RulesSettings, on_progress: Progress = unseen
) -> Iterator[RuleLaw]:
    """Measure rules one after the other, each at all temperatures and numbers of drafts.

    Args:
        rules: the rules, with their schemes; those of a scheme together, since they share an optimum.
        rows: the rows at each temperature.
        settings: the numbers of drafts, and how many nodes are timed.
        on_progress: told of every result.
    """
    tasks = [(rule, k, one) for rule in rules for one in rows for k in _numbers(rule, settings.drafts)]
    optima: dict[tuple[Scheme, int, float], float] = {}
    for done, (rule, k, one) in enumerate(tasks, start=1):
        key = (rule.scheme, k, one.temperature)
        if key not in optima:
            optima[key] = optimum(rule.scheme, one, k)
        single, slowest, batch = law_milliseconds(rule, one.spread(settings.nodes), k)
        accepted, positions = acceptance(rule, one, k), len(one.draft)
        cost = (single, slowest, batch, settings.nodes)
        names = (rule.name, rule.scheme.name, rule.lossless, k, one.temperature)
        yield RuleLaw(*names, *cost, accepted, optima[key], positions)
        on_progress("laws", done, len(tasks))


def _numbers(rule: NodeVerifier, drafts: Sequence[int]) -> list[int]:
    """Return the numbers of drafts at which a rule is measured: as asked for, but no more than it takes."""
    return sorted({min(k, NodeCase(rule.name, rule).most) for k in drafts})


@torch.inference_mode()  # as laws are computed while generating
def law_milliseconds(rule: NodeVerifier, rows: Rows, k: int) -> tuple[float, float, float]:
    """Return the time of the law at a node, the median over nodes, at the slowest node, and for all nodes at once."""
    draft, device = rows_for(rule.scheme, rows.draft), rows.draft.device
    counts, atoms = torch.full((len(draft),), k, device=device), draft.shape[-1] - 1
    uniforms = Noise.from_seed(k, 1).uniform(len(draft), max(k, atoms))[0].to(device)
    drafts = rule.scheme.sample(draft[..., :-1], counts, uniforms, k)
    with one_thread():
        rule.law(drafts, draft, rows.target)
        batch = partial(rule.law, drafts, draft, rows.target)
        whole = median(own_milliseconds(batch, device) for _ in range(BATCHES))
        nodes = [
            partial(rule.law, drafts[at : at + 1], draft[at : at + 1], rows.target[at : at + 1])
            for at in range(len(draft))
        ]
        single = [median(own_milliseconds(node, device) for _ in range(TURNS)) for node in nodes]
    return median(single), max(single), whole


def acceptance(rule: NodeVerifier, rows: Rows, k: int) -> float | None:
    """Return what a rule accepts of k drafts, the mean over positions; None where it is too dear to compute."""
    case, precise = NodeCase(rule.name, rule), rows.precise()
    if case.gap_at(k, rows.draft.shape[-1] - 1):
        return None
    counts = torch.full((len(rows.draft),), k, device=rows.draft.device)
    return float(case.acceptance(rows_for(rule.scheme, precise.draft), precise.target, counts).mean())


def optimum(scheme: Scheme, rows: Rows, k: int) -> float:
    """Return what the best rule for a scheme accepts of k drafts, the mean over positions."""
    precise, counts = rows.precise(), torch.full((len(rows.draft),), k, device=rows.draft.device)
    return float(optimal_set(scheme, rows_for(scheme, precise.draft), precise.target, counts).acceptance.mean())
