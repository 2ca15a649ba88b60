"""Every private attribute of another package that the source names, and the version in which it was last checked.

A private attribute may go in any release. `tests/test_private_names.py` tells which of them are gone from the versions
that are installed, and which names of the source are missing here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Private:
    """A private attribute of another package.

    Args:
        name: the attribute.
        package: the package that it belongs to, as it is installed.
        version: the newest version in which it was there.
        holder: returns what has the attribute, in the installed version.
        used: what it is needed for.
    """

    name: str
    package: str
    version: str
    holder: Callable[[], Any]
    used: str


def of(path: str, *given: Any) -> Callable[[], Any]:
    """Return how to get what a module holds, called with arguments if there are any: "module:Name"."""
    module, _, name = path.partition(":")

    def found() -> Any:
        held = import_module(module)
        for part in filter(None, name.split(".")):
            held = getattr(held, part)
        return held(*given) if given else held

    return found


def assigned(path: str) -> Callable[[], Any]:
    """Return how to get the names that the methods of a class speak of, where no instance can be made here."""

    def found() -> Any:
        held = of(path)()
        names = {
            name for one in vars(held).values() for name in getattr(getattr(one, "__code__", None), "co_names", ())
        }
        return type("Names", (), dict.fromkeys({*names, *dir(held)}))

    return found


PRIVATE = (
    Private("_exit", "python", "3.11", of("os:"), "an end at once, without the threads that hang"),
    Private("_attn_implementation", "transformers", "5.24.0", of("transformers:PreTrainedConfig"), "which kernel runs"),
    Private("_from_config", "transformers", "5.24.0", of("transformers:LlamaForCausalLM"), "tiny models of every type"),
    Private(
        "_prefix_allowed_tokens_fn",
        "transformers",
        "5.24.0",
        of("transformers:PrefixConstrainedLogitsProcessor", None, 1),
        "the user's function, asked of every node of a tree",
    ),
    Private("_version", "torch", "2.14.1", of("torch:zeros", 1), "whether weights changed since they were packed"),
    Private("_weight_int8pack_mm", "torch", "2.14.1", of("torch:ops.aten"), "drafts of the target in eight bits"),
    Private("_reorder_linear_weight", "torch", "2.14.1", of("torch:ops.mkldnn"), "packed weights on a CPU"),
    Private("_linear_pointwise", "torch", "2.14.1", of("torch:ops.mkldnn"), "the product with packed weights"),
    Private("_is_avx512_bf16_supported", "torch", "2.14.1", of("torch:cpu"), "half precision in Muon on a CPU"),
    Private("_type_traits", "gguf", "0.19.0", of("gguf.quants:"), "which quantisations can be read"),
    Private(
        "_guides", "outlines", "1.3.3", assigned("outlines.backends.outlines_core:OutlinesCoreLogitsProcessor"), "forks"
    ),
    Private(
        "_bitmasks",
        "outlines",
        "1.3.3",
        assigned("outlines.backends.outlines_core:OutlinesCoreLogitsProcessor"),
        "forks",
    ),
    Private(
        "_bias_logits", "outlines", "1.3.3", assigned("outlines.backends.llguidance:LLGuidanceLogitsProcessor"), "forks"
    ),
    Private("_matchers", "outlines", "1.3.3", assigned("outlines.backends.xgrammar:XGrammarLogitsProcessor"), "forks"),
    Private("_bitmask", "outlines", "1.3.3", assigned("outlines.backends.xgrammar:XGrammarLogitsProcessor"), "forks"),
)
