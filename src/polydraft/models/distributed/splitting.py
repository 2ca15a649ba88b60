"""How a target's weights are shared among ranks, and whether they can be: read off its configuration."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from polydraft.errors import InvalidParameter, UnsupportedModel, is_whole, shown
from polydraft.fetched import is_derived
from polydraft.models.distributed.parcel import RANKS

MLP = "mlp:"
"""Before a number of ranks: only inner layers and the output head are shared, attention is whole on every rank."""
KEYS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""The projections that make a layer's keys; what stands beside them is attention."""
MOST = 1024


@dataclass(frozen=True)
class TargetSplit:
    """Over how many ranks a target lies, and which of its parts are shared.

    Args:
        ranks: how many processes hold it.
        attention: whether heads are shared too; else every rank has all of them.
    """

    ranks: int
    attention: bool = True

    @classmethod
    def named(cls, given: object) -> "TargetSplit":
        """Return what a number, or "mlp:2", means.

        Raises:
            InvalidParameter: it is nothing of the kind, or one rank or none.
        """
        if isinstance(given, TargetSplit):
            return given
        number, attention = given, True
        if isinstance(given, str):
            attention = not given.startswith(MLP)
            digits = given.removeprefix(MLP)
            number = int(digits) if digits.isdecimal() and len(digits) < 6 else None
        if not is_whole(number) or not 2 <= int(number) <= MOST:  # pyright: ignore[reportArgumentType]
            raise InvalidParameter(
                f"parallel must be a number of ranks from 2 to {MOST}, or mlp: and such a number, but is "
                f"{shown(given)}; leave it out for one process."
            )
        return cls(int(number), attention)  # pyright: ignore[reportArgumentType]

    def __str__(self) -> str:
        """Return the word that means it."""
        return f"{'' if self.attention else MLP}{self.ranks}"

    def check(self, config: PreTrainedConfig, name: str) -> None:
        """Check that a target can be shared so, before a weight is loaded.

        Args:
            config: the target's.
            name: what the target is called in errors.

        Raises:
            UnsupportedModel: heads or inner layers do not divide, transformers has no plan for its kind, or it is more
                than a decoder of text; the text has the numbers.
        """
        if config.is_encoder_decoder or config.sub_configs:
            raise UnsupportedModel(
                f"{name} ({config.model_type}) is not only a decoder of text, and nothing else is run over several "
                "ranks; leave parallel out."
            )
        ranks = self.ranks
        if not plan_of(config):
            raise UnsupportedModel(
                f"transformers has no plan by which ranks share a {config.model_type}, so {name} lies on one; leave "
                "parallel out."
            )
        if self.attention:
            _check_heads(config, ranks, name, f'"{MLP}{ranks}", which leaves attention whole on every rank')
        inner = getattr(config, "intermediate_size", None)
        if isinstance(inner, int) and inner % ranks:
            raise UnsupportedModel(
                f"{name} has inner layers of {inner}, which {ranks} ranks cannot share evenly; take a number that "
                "divides it."
            )

    def arguments(self, config: PreTrainedConfig, prefix: str) -> dict[str, Any]:
        """Return what transformers is told when it loads a part; `prefix` is where a model has its body."""
        plan = plan_of(config)
        attention = {name.rpartition(".")[0] for name in plan if name.rpartition(".")[2] in KEYS}
        whole = [name for name in plan if name.rpartition(".")[0] in attention and not self.attention]
        told = {f"{prefix}.{name}": "replicate" for name in whole}
        return {"distributed_config": DistributedConfig(tp_size=self.ranks, tp_plan=told or None)}


def plan_of(config: PreTrainedConfig) -> dict[str, str]:
    """Return transformers' plan for a kind of model, by the names of modules; empty if it has none."""
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def _check_heads(config: Any, ranks: int, name: str, way: str) -> None:
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks or keys % ranks:
        raise UnsupportedModel(
            f"{name} has {heads} heads and {keys} of keys, which {ranks} ranks cannot share; take a number that "
            f"divides both, or {way}."
        )


def check_own_plan(model: Any, name: str) -> None:
    """Check that the heads of a model that somebody else has loaded over several ranks divide, where they are shared.

    Raises:
        UnsupportedModel: they do not; a pass would end in an error about shapes.
    """
    ranks = getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1
    if ranks > 1 and any(
        style == "colwise" and part.rpartition(".")[2] in KEYS for part, style in model.tp_plan.items()
    ):
        _check_heads(model.config.get_text_config(), ranks, name, "a tp_plan that replicates attention")


def check_over_ranks(model: Any, name: str, *, reads: bool, learns: bool, fixed: bool) -> bool:
    """Check how a text is drafted for a target over several ranks; return whether times may choose its trees.

    Where rank 0 decides they may. Where every rank calls by itself (plain SPMD), all must choose alike.

    Args:
        model: the target, loaded over several ranks.
        name: what the drafter is called in errors.
        reads: whether the drafter reads the target's states, keys or queries.
        learns: whether trees or drafts depend on times, or on what other calls have written.
        fixed: whether the text is fixed, by a seed or at temperature 0.

    Raises:
        UnsupportedModel: the drafter reads the target's states.
        InvalidParameter: ranks that call by themselves would draw other numbers, or run other passes.
    """
    ranks, leads = model.config.distributed_config.tp_size, getattr(model, RANKS, None) is not None
    if reads:
        raise UnsupportedModel(
            f"The drafter {name!r} reads the target's states or keys, and these are not handed out by a target over "
            f"{ranks} ranks; take a draft model, or one that drafts from text, such as ngram."
        )
    if leads:
        return True
    for which, is_so in {
        "a planner, or a drafter that learns from other calls, may choose other passes on each": learns,
        "each would draw a seed of its own": not fixed,
    }.items():
        if is_so:
            raise InvalidParameter(
                f"This target is run by {ranks} ranks that call by themselves, and {which}; load it by "
                f"polydraft.load(..., parallel={ranks}), so that rank 0 decides, or give a seed, a tree and a drafter "
                "without a memory."
            )
    return False


def check_shared(*, weights: object, draft: object, device: object) -> None:
    """Check what is asked for beside a target over several ranks.

    Raises:
        InvalidParameter: weights of few bits, a draft made of the target, which needs it whole, or a device: each rank
            takes its own.
    """
    if weights is not None:
        raise InvalidParameter(f"weights={weights!r} rounds a whole target, and parallel shares it; leave one out.")
    if device != "auto":
        raise InvalidParameter(
            f"With parallel each rank takes its own device, and device is {shown(device)}; leave it out, and say by "
            "CUDA_VISIBLE_DEVICES which GPUs there are, or none."
        )
    if is_derived(draft):
        raise InvalidParameter(
            f"The draft {shown(str(draft))} is made of a whole target, and parallel shares it; take a draft model, or "
            "one that drafts from text, such as ngram."
        )
