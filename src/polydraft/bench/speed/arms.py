"""Arms: ways of continuing prompts that are measured against each other; those of polydraft's own engine."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.bench.speed.replay import Replay, end_ids
from polydraft.catalogue import tree_in_words
from polydraft.drafters import Drafter, NoDraft
from polydraft.engine import Run, Statistics, stream
from polydraft.trees import TreePolicy
from polydraft.verifiers import TreeVerifier

NO_FILTERS: Mapping[str, float] = MappingProxyType({})
PLAIN = "plain"
"""The name of the arm that all others are compared with: polydraft's loop without drafts."""


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Prompts as every arm gets them: left-padded rows, a mask that is 0 on the padding, and how texts go on and end.

    Args:
        input_ids: the rows.
        attention_mask: the mask.
        until_end: whether a text ends where the model ends it; else it goes on for all its tokens.
        replay: shuts all tokens but those of known texts; None where the model writes its own.
        files: a text for each row that the answer will resemble; None where there is none.
    """

    input_ids: Int[Tensor, "b t"]
    attention_mask: Int[Tensor, "b t"]
    until_end: bool = False
    replay: Replay | None = None
    files: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, prompts: Sequence[Int[Tensor, "1 _"]], until_end: bool = False) -> "PromptBatch":
        """Return the batch of single prompts."""
        longest = max(one.shape[1] for one in prompts)
        short = [longest - one.shape[1] for one in prompts]
        pad = nn.functional.pad
        ids = [pad(one, (missing, 0)) for one, missing in zip(prompts, short, strict=True)]
        masks = [pad(torch.ones_like(one), (missing, 0)) for one, missing in zip(prompts, short, strict=True)]
        return cls(torch.cat(ids), torch.cat(masks), until_end)

    def room(self, max_new_tokens: int) -> int:
        """Return how many new tokens a row can have: no more than known texts and their ends, if they are known."""
        return max_new_tokens if self.replay is None else min(max_new_tokens, self.replay.tokens.shape[1])

    def row(self, number: int) -> Int[Tensor, " t"]:
        """Return one prompt without its padding."""
        return self.input_ids[number][self.attention_mask[number].bool()]


@dataclass(frozen=True)
class Generated:
    """What an arm gave for a batch.

    Args:
        tokens: the new tokens of every row.
        statistics: counts and times by part; None if the arm does not tell.
        setup: what it did, in words: drafter, scheme, verifier, tree.
    """

    tokens: tuple[tuple[int, ...], ...]
    statistics: Statistics | None = None
    setup: dict[str, str] = field(default_factory=dict)


Continue = Callable[[PromptBatch, float, int, int], Generated]
"""Continues every prompt at a temperature by so many tokens, by fewer where texts end; the last number is the seed."""


@dataclass(frozen=True, eq=False)
class Arm:
    """One way of generating text.

    Args:
        name: what it is called in results; no two arms of a run share a name.
        run: continues a batch.
        lossless: whether its output law is the target's, so that its text at temperature 0 must be the plain one.
        most_rows: the largest batch that it can do; None for any.
        description: what it is; runs of one name and different descriptions are not put together.
    """

    name: str
    run: Continue
    lossless: bool = True
    most_rows: int | None = None
    description: str = ""


def drafting_arm(
    name: str,
    model: nn.Module,
    drafter: Drafter | nn.Module | None,
    verifier: TreeVerifier | None = None,
    policy: TreePolicy | None = None,
    *,
    predicts: bool = False,
    filters: Mapping[str, float] = NO_FILTERS,
) -> Arm:
    """Return an arm of polydraft's engine; what is None is chosen as `generate` does.

    If it `predicts`, it drafts first from the file of a prompt that has one, by `prediction`. Above temperature 0 the
    law is filtered by these settings of `SamplingParams`.
    """

    def run(batch: PromptBatch, temperature: float, max_new_tokens: int, seed: int) -> Generated:
        options = generation_options(model, batch, temperature, max_new_tokens)
        options |= filters if temperature > 0 else {}
        if batch.replay is not None:
            options["logits_processor"] = [batch.replay]
        if predicts:
            options["prediction"] = batch.files
        done = stream(
            model, drafter=drafter, verifier=verifier, policy=policy, seed=seed, time=True, **options
        ).exhaust()
        return Generated(tuple(map(tuple, done.new_tokens)), done.statistics, setup_in_words(done))

    return Arm(name, run, lossless=verifier is None or verifier.lossless)


def plain_arm(model: nn.Module, filters: Mapping[str, float] = NO_FILTERS) -> Arm:
    """Return plain decoding: the same loop without drafts; arguments as of `drafting_arm`."""
    return drafting_arm(PLAIN, model, NoDraft(), filters=filters)


def rounded_arm(model: nn.Module) -> Arm:
    """Return plain decoding with weights rounded to bfloat16: another law, and so not lossless, for comparison."""
    rounded = copy.deepcopy(model)
    for weight in rounded.parameters():  # buffers, the frequencies of rotations among them, stay as they are
        weight.data = weight.data.to(torch.bfloat16)
    return replace(plain_arm(rounded), name="bfloat16", lossless=False)


def generation_options(model: Any, batch: PromptBatch, temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return Hugging Face's generation arguments, the same for every arm.

    The id of padding is set to one that no token has, so that Hugging Face's assistant does not take a token of the
    text for padding and hide it from itself; in batches, where rows that have ended are padded, it is the end's. Unless
    texts end, so is the id of the end: every arm gives as many tokens as asked for, and none spends time on forbidding
    the end. Sampling is from the whole distribution; Hugging Face's default would cut it to 50 tokens.
    """
    nothing = model.config.get_text_config().vocab_size
    ends = end_ids(model) if batch.until_end else []
    options: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": ends or nothing,
        "pad_token_id": ends[0] if ends and len(batch.input_ids) > 1 else nothing,
        "do_sample": temperature > 0,
    }
    return options | {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else options


def setup_in_words(run: Run) -> dict[str, str]:
    """Return what determined a run but for the models."""
    setup = run.setup
    if setup.method.drafter.name == NoDraft.name:
        return {"drafter": setup.method.drafter.name}
    return {
        "drafter": setup.method.drafter.name,
        "scheme": setup.method.verifier.scheme.name,
        "verifier": setup.method.verifier.name,
        "tree": tree_in_words(setup.method.policy),
    }
