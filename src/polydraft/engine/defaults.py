"""Choices that are right without thinking: who drafts, which rule and which tree, in one place for every surface."""

from contextlib import suppress

import torch
from torch import nn

from polydraft.drafters import Defaults, Drafter, ModelDrafter, drafts_under, model_defaults, route_first
from polydraft.errors import InvalidParameter, UnpairedScheme
from polydraft.models import CompiledModel, HuggingFaceModel, draft_model
from polydraft.probs import SamplingParams
from polydraft.schemes import IID, Given, Product, Scheme, TopK
from polydraft.trees import TreePolicy
from polydraft.verifiers import (
    BlockVerification,
    ByShape,
    NaiveMatch,
    Optimal,
    RecursiveRejection,
    TopDown,
    TreeVerifier,
)

CERTAIN: dict[Scheme, TreeVerifier] = {
    Given(): TopDown(NaiveMatch(Given())),
    TopK(): TopDown(NaiveMatch(TopK())),
    Product(): TopDown(NaiveMatch(Product())),
}
"""The rules of drafts that are fixed by the draft rows, which naive match verifies optimally; at any temperature for
tokens from outside, at 0 for all others."""
DRAWN: dict[Scheme, TreeVerifier] = {
    Given(): TopDown(NaiveMatch(Given())),
    TopK(): TopDown(NaiveMatch(TopK())),
    Product(): TopDown(RecursiveRejection(Product())),
    IID(): ByShape(),
}
"""The rules above temperature 0. A chain is verified as a block, which no rule beats; on trees, the top tokens and one
sampled token have an optimal rule that costs next to nothing (docs/choosing.md)."""


def default_verifier(drafter: Drafter, params: SamplingParams) -> TreeVerifier:
    """Return the rule for the drafts that suit this drafter at this temperature.

    Where the usual rule is for another scheme than the drafter's own and the drafter cannot draft so, and for schemes
    that have none, chains are verified as blocks and trees by the optimal rule of a node, as far as there are these for
    the scheme; else by naive match, which is exact for all.
    """
    scheme = _usual(drafter, params).scheme
    usual = (DRAWN if params.temperature else CERTAIN).get(scheme)
    if usual is not None and drafts_under(drafter, usual.scheme):
        return usual
    if params.temperature:
        with suppress(UnpairedScheme):
            tree = TopDown(Optimal(scheme))
            return ByShape(BlockVerification(scheme), tree) if scheme.lone_draft_is_drawn else tree
    return TopDown(NaiveMatch(scheme))


def default_policy(drafter: Drafter, params: SamplingParams) -> TreePolicy:
    """Return the trees that suit this drafter at this temperature.

    `polydraft tune` finds better ones for other models and machines than those that were measured.
    """
    return _usual(drafter, params).policy


def default_drafter(drafter: Drafter, params: SamplingParams, device: torch.device, *, fixed: bool = False) -> Drafter:
    """Return who drafts if nothing but a draft model or a head was named: at temperature 0, a route of text before it.

    Greedy text repeats itself, and what is found in it costs no pass; at temperature 1 it is seldom right. Text is read
    on the host, for which a GPU would have to be waited for. Measured beside lookups alone (docs/performance.md).

    Args:
        drafter: the draft model's drafter, or the head's.
        params: the target's sampling settings.
        device: the target's device.
        fixed: whether trees were named, or passes are compiled, each for one shape: guesses have shapes of their own.
    """
    return drafter if fixed or params.temperature or device.type != "cpu" else route_first(drafter)


def text_word(params: SamplingParams) -> str:
    """Return the word of who drafts if nobody was named: all text drafters in one tree, or one of them in each step.

    At temperature 0 the merge was fastest. Above it drafts from text are seldom right, and a route soon drafts nothing
    where they are not (docs/performance.md).
    """
    return "route" if params.temperature else "merge"


def as_drafter(drafter: Drafter | nn.Module, *, compile: bool = False) -> Drafter:
    """Turn what users pass into a drafter: a model drafts, compiled if asked."""
    if not isinstance(drafter, nn.Module):
        return drafter
    return ModelDrafter(draft_model(drafter, compile=compile))


def target_model(model: nn.Module, *, compile: bool = False) -> HuggingFaceModel:
    """Return the target as the engine runs it: the model's own code, compiled if asked.

    Raises:
        InvalidParameter: torch puts new tensors on another device than the CPU, where the engine's own are.
    """
    usual = torch.get_default_device()
    if usual.type != "cpu":
        raise InvalidParameter(
            f"torch's default device is {usual}, and polydraft keeps its own numbers on the CPU; leave "
            "torch.set_default_device out and put the models on their device by model.to."
        )
    return CompiledModel(model) if compile else HuggingFaceModel(model)


def _usual(drafter: Drafter, params: SamplingParams) -> Defaults:
    return drafter.defaults(params) or model_defaults(params)
