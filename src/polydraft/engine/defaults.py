"""Choices that are right without thinking: which rule and which tree, by drafter and temperature."""

import torch
from torch import nn

from polydraft.drafters import Drafter, EnsembleDrafter, LookupFirst, ModelDrafter, NgramDrafter
from polydraft.models import LEVELS, CompiledModel, FusedModel, HuggingFaceModel, draft_model
from polydraft.probs import SamplingParams
from polydraft.schemes import Given, Product, TopK
from polydraft.trees import Chain, Fixed, TreePolicy, TreeShape
from polydraft.verifiers import ByShape, NaiveMatch, RecursiveRejection, TopDown, TreeVerifier

GREEDY = Fixed(TreeShape(((3,), (2, 1, 0), (2, 1, 0), (1, 1, 0), (1, 1), (1, 0))))
SAMPLED = Chain(5)


def default_verifier(drafter: Drafter, params: SamplingParams) -> TreeVerifier:
    """Return the rule that gives the embedded pair most tokens per second for this drafter and temperature.

    Deterministic drafts (n-grams; the top tokens at temperature 0) are verified optimally by naive match. Above
    temperature 0 a chain, the default there, is verified as a block, which no rule beats. On trees, drafting the top
    tokens and one sampled token has an optimal rule that costs next to nothing; it was measured ahead of dearer rules
    that accept a little more (docs/choosing.md).
    """
    if isinstance(drafter, NgramDrafter):
        return TopDown(NaiveMatch(Given()))
    if isinstance(drafter, EnsembleDrafter):
        return TopDown(RecursiveRejection(Product()) if params.temperature else NaiveMatch(Product()))
    return ByShape() if params.temperature else TopDown(NaiveMatch(TopK()))


def default_policy(drafter: Drafter, params: SamplingParams) -> TreePolicy:
    """Return a tree that was measured to be good for the embedded pair on two CPU cores (docs/performance.md).

    At temperature 0 a tree, else a chain: on a CPU second drafts cost more than they are accepted for, and those of a
    chain are drawn from the whole row. `polydraft tune` finds a better one for other models and machines.
    """
    if isinstance(drafter, NgramDrafter):
        return Chain(8)
    return SAMPLED if params.temperature else GREEDY


def as_drafter(drafter: Drafter | nn.Module | None, *, compile: bool = False) -> Drafter:
    """Turn what users pass into a drafter: a model drafts, compiled if asked; None means prompt lookup.

    Compiling is left to a draft model that cannot be fused, and to GPUs: on a CPU fused passes were the faster ones.
    """
    if drafter is None:
        return NgramDrafter()
    if not isinstance(drafter, nn.Module):
        return drafter
    cheapest = draft_model(drafter)
    if compile and not (isinstance(cheapest, FusedModel) and cheapest.device.type == "cpu"):
        return ModelDrafter(CompiledModel(drafter, LEVELS))
    return ModelDrafter(cheapest)


def default_drafter(drafter: Drafter, params: SamplingParams, device: torch.device) -> Drafter:
    """Return who drafts for a text if nothing but a draft model was named: at temperature 0, lookups before it.

    Greedy text repeats itself, and what is looked up costs no pass; at temperature 1 lookups are seldom right. They
    read the text on the host, for which a GPU would have to be waited for.
    """
    return drafter if params.temperature or device.type != "cpu" else LookupFirst(drafter)


def target_model(model: nn.Module, *, compile: bool = False) -> HuggingFaceModel:
    """Return the target as the engine runs it: the model's own code, compiled if asked."""
    return CompiledModel(model) if compile else HuggingFaceModel(model)
