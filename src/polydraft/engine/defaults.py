"""Choices that are right without thinking: which rule and which tree, by drafter and temperature."""

from torch import nn

from polydraft.drafters import Drafter, ModelDrafter, NgramDrafter
from polydraft.models import HuggingFaceModel
from polydraft.probs import SamplingParams
from polydraft.schemes import Given, TopK
from polydraft.trees import Chain, TreePolicy, Widths
from polydraft.verifiers import NaiveMatch, RecursiveRejectionWithoutReplacement, TopDown, TreeVerifier


def default_verifier(drafter: Drafter, params: SamplingParams) -> TreeVerifier:
    """Return the rule that accepts most for this drafter and temperature.

    Deterministic drafts (n-grams; the top tokens at temperature 0) are verified optimally by naive match. Above
    temperature 0, sampling without replacement has the highest acceptance of the random schemes in nearly all cases.
    """
    if isinstance(drafter, NgramDrafter):
        return TopDown(NaiveMatch(Given()))
    if params.temperature == 0:
        return TopDown(NaiveMatch(TopK()))
    return TopDown(RecursiveRejectionWithoutReplacement())


def default_policy(drafter: Drafter, params: SamplingParams) -> TreePolicy:
    """Return a tree that was measured to be good for the embedded pair on two CPU cores (docs/performance.md)."""
    if isinstance(drafter, NgramDrafter):
        return Chain(8)
    return Widths((2, 1)) if params.temperature else Widths((2, 2, 1, 1))


def as_drafter(drafter: Drafter | nn.Module | None) -> Drafter:
    """Turn what users pass into a drafter: a model drafts as it is, None means prompt lookup."""
    if drafter is None:
        return NgramDrafter()
    if isinstance(drafter, nn.Module):
        return ModelDrafter(HuggingFaceModel(drafter))
    return drafter
