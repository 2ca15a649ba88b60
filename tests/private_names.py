"""Every private attribute of another package that the source names, and the version in which it was last checked.

A private attribute may go in any release. `tests/test_private_names.py` tells which of them are gone from the versions
that are installed, and which names of the source are missing here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
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
        codes = (getattr(one, "__code__", None) for one in (held, *vars(held).values()))
        names = {name for code in codes for name in getattr(code, "co_names", ())}
        return SimpleNamespace(**dict.fromkeys({*names, *dir(held)}))

    return found


OF_MODULES = """
    _parameters _buffers _modules _non_persistent_buffers_set _is_full_backward_hook _backward_hooks
    _backward_pre_hooks _forward_hooks _forward_pre_hooks _forward_hooks_with_kwargs _forward_hooks_always_called
    _forward_pre_hooks_with_kwargs _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks
    _load_state_dict_post_hooks
""".split()
MODULES = "torch.nn.modules.module:"
PRIVATE = (
    *(
        Private(name, "torch", "2.14.1", of("torch:nn.Identity", 0), "which fields of modules count")
        for name in OF_MODULES
    ),
    Private("_global_forward_hooks", "torch", "2.14.1", of(MODULES), "whether a model's function changed"),
    Private("_global_forward_pre_hooks", "torch", "2.14.1", of(MODULES), "whether a model's function changed"),
    Private("_orig_mod", "torch", "2.14.1", assigned("torch._dynamo.eval_frame:OptimizedModule"), "the model inside"),
    Private("_hf_hook", "accelerate", "1.15.0", assigned("accelerate.hooks:add_hook_to_module"), "offloaded weights"),
    Private("_cache", "numba", "0.68.1", assigned("numba.core.dispatcher:Dispatcher"), "broken files of machine code"),
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
    Private("_supports_sdpa", "transformers", "5.24.0", of("transformers:LlamaForCausalLM"), "which kernel runs"),
    Private(
        "_keys_to_ignore_on_load_unexpected",
        "transformers",
        "5.24.0",
        of("transformers:DeepseekV3ForCausalLM"),
        "whether modules were left out of a model",
    ),
    Private(
        "_keep_in_fp32_modules_strict",
        "transformers",
        "5.24.0",
        of("transformers:DeepseekV3ForCausalLM"),
        "what a layer keeps in single precision",
    ),
    Private("_version", "torch", "2.14.1", of("torch:zeros", 1), "whether weights changed since they were packed"),
    Private("_weight_int8pack_mm", "torch", "2.14.1", of("torch:ops.aten"), "drafts of the target in eight bits"),
    Private("_weight_int4pack_mm_for_cpu", "torch", "2.14.1", of("torch:ops.aten"), "targets of four bits"),
    Private("_convert_weight_to_int4pack_for_cpu", "torch", "2.14.1", of("torch:ops.aten"), "targets of four bits"),
    Private("_reorder_linear_weight", "torch", "2.14.1", of("torch:ops.mkldnn"), "packed weights on a CPU"),
    Private("_linear_pointwise", "torch", "2.14.1", of("torch:ops.mkldnn"), "the product with packed weights"),
    Private(
        "_is_mkldnn_bf16_supported",
        "torch",
        "2.14.1",
        of("torch:ops.mkldnn"),
        "whether oneDNN may multiply in bfloat16",
    ),
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
