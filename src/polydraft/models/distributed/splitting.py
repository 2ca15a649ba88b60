"""How a target's weights are shared among ranks, and whether they can be: read off its configuration."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from polydraft.errors import InvalidParameter, UnsupportedModel, is_whole, shown
from polydraft.fetched import is_derived
from polydraft.models.checks.supported import remembers

MLP = "mlp:"
"""Before a number of ranks: only inner layers and the output head are shared, attention is whole on every rank."""
KEYS = ("k_proj", "qkv_proj", "query_key_value", "kv_b_proj")
"""The projections that make a layer's keys; what stands beside them is attention."""
MOST = 1024


@dataclass(frozen=True)
class Sharing:
    """Over how many ranks a target lies, and which of its parts are shared.

    Args:
        ranks: how many processes hold it.
        attention: whether heads are shared too; else every rank has all of them.
    """

    ranks: int
    attention: bool = True

    @classmethod
    def named(cls, given: object) -> "Sharing":
        """Return what a number, or "mlp:2", means.

        Raises:
            InvalidParameter: it is nothing of the kind, or one rank or none.
        """
        if isinstance(given, Sharing):
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
                than a decoder of text, or keeps states; the text has the numbers.
        """
        if config.is_encoder_decoder or config.sub_configs or remembers(config):
            raise UnsupportedModel(
                f"{name} ({config.model_type}) is not only attention over text, and nothing else is run over several "
                "ranks; leave parallel out."
            )
        plan, ranks = plan_of(config), self.ranks
        if not plan:
            raise UnsupportedModel(
                f"transformers has no plan by which a {config.model_type} is shared among ranks, so {name} lies on one; "
                "leave parallel out."
            )
        told: Any = config
        heads = told.num_attention_heads
        keys = getattr(told, "num_key_value_heads", None) or heads
        if self.attention and (heads % ranks or keys % ranks):
            raise UnsupportedModel(
                f"{name} has {heads} heads and {keys} of keys, which {ranks} ranks cannot share; take a number that "
                f'divides both, or "{MLP}{ranks}", which leaves attention whole on every rank.'
            )
        inner = getattr(told, "intermediate_size", None)
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
