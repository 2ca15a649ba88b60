"""Every argument of Hugging Face's `generate`: honoured exactly, or refused by name."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from polydraft.errors import InvalidParameter, is_number, is_whole, shown
from polydraft.models.generation.prompts import OF_DECODERS, own_inputs

HONOURED = frozenset(
    """
    max_length max_new_tokens min_length min_new_tokens max_time stop_strings tokenizer
    do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff
    repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens sequence_bias guidance_scale negative_prompt_ids
    negative_prompt_attention_mask watermarking_config prefix_allowed_tokens_fn logits_processor stopping_criteria
    num_return_sequences return_dict_in_generate output_scores output_logits
    pad_token_id bos_token_id eos_token_id
    inputs input_ids attention_mask generation_config streamer
    assistant_model num_assistant_tokens assistant_confidence_threshold prompt_lookup_num_tokens
    max_matching_ngram_size
    """.split()
)
"""What is set by these names means what it means to Hugging Face."""

WITH_TOKENS = frozenset(("grammar",))
"""polydraft's own arguments that go the way of Hugging Face's, since the law of the text follows from them."""
OURS = tuple(
    """
    grammar drafter verifier policy seed generator compile past keep_past output_logprobs time batch_size per_prompt
    """.split()
)
"""polydraft's own arguments beside Hugging Face's."""
PASSIVE = (None, False)


@dataclass(frozen=True)
class Refusal:
    """Why an argument is refused.

    Args:
        reason: the end of a sentence that begins with the argument and its value.
        off: the values that ask for nothing.
        shapes_text: whether it changes which text is written, and not only how fast or in what memory; then it is
            refused also where the model's own generation_config asks for it.
    """

    reason: str
    off: tuple[Any, ...] = PASSIVE
    shapes_text: bool = False


DRAFTING: Mapping[str, str] = {
    "assistant_model": "",
    "num_assistant_tokens": "assistant_model",
    "assistant_confidence_threshold": "assistant_model",
    "prompt_lookup_num_tokens": "",
    "max_matching_ngram_size": "prompt_lookup_num_tokens",
}
"""Hugging Face's arguments about drafts, each with the one that it belongs to."""

_BEAMS = "polydraft samples or decodes greedily and has no beams; call model.generate for beam search"
_SEARCH = "polydraft samples or decodes greedily; call model.generate for this way of decoding"
_CACHE = "polydraft keeps keys and values in a cache of its own, whose branches can be dropped; leave it out"
_UNIVERSAL = "a drafter must share the target's tokens; leave it out"
_ITSELF = "polydraft has no drafter of this kind; pass drafter= or leave it out"

_ALIKE = "all rows are of one model; choose adapters by set_adapter and make a call for each choice"
_NO_ENCODER = "the model has no encoder, and its text starts with the prompt; leave it out"

REFUSED: Mapping[str, Refusal] = {
    "num_beams": Refusal(_BEAMS, (None, 1), shapes_text=True),
    "num_beam_groups": Refusal(_BEAMS, (None, 1), shapes_text=True),
    "diversity_penalty": Refusal(_BEAMS, (None, 0), shapes_text=True),
    "constraints": Refusal(_BEAMS, (None, []), shapes_text=True),
    "force_words_ids": Refusal(_BEAMS, (None, []), shapes_text=True),
    "early_stopping": Refusal(_BEAMS),
    "length_penalty": Refusal(_BEAMS, (None, 1)),
    "low_memory": Refusal(_SEARCH),
    "penalty_alpha": Refusal(_SEARCH, (None, 0), shapes_text=True),
    "dola_layers": Refusal(_SEARCH, (None,), shapes_text=True),
    "custom_generate": Refusal(
        "polydraft.generate is such a function itself; call model.generate(custom_generate=polydraft.generate)", (None,)
    ),
    "trust_remote_code": Refusal("nothing is loaded from a repository here; leave it out"),
    "token_healing": Refusal("heal the prompt first: model.heal_tokens(input_ids, tokenizer)", shapes_text=True),
    "use_cache": Refusal(_CACHE, (None, True)),
    "cache_implementation": Refusal(_CACHE, (None,)),
    "cache_config": Refusal(_CACHE, (None,)),
    "max_cache_len": Refusal(_CACHE, (None,)),
    "past_key_values": Refusal(_CACHE, (None,)),
    "cache": Refusal(_CACHE, (None,)),
    "prefill_chunk_size": Refusal("a prompt is read in one pass; leave it out", (None,)),
    "compile_config": Refusal("compile=True compiles passes in polydraft's own way; leave it out", (None,)),
    "disable_compile": Refusal("nothing is compiled unless compile=True; leave it out", (None, False, True)),
    "continuous_batching_config": Refusal("polydraft.generate_many runs many prompts; leave it out", (None,)),
    "synced_gpus": Refusal("polydraft runs in one process; leave it out"),
    "output_attentions": Refusal("attention weights are not kept; score the finished text with the model"),
    "output_hidden_states": Refusal("hidden states are not kept; score the finished text with the model"),
    "adapter_names": Refusal(_ALIKE, (None,)),
    "inputs_embeds": Refusal("polydraft reads token ids only; pass input_ids", (None,)),
    "position_ids": Refusal("positions follow from attention_mask; leave it out", (None,)),
    "decoder_start_token_id": Refusal(_NO_ENCODER, (None,)),
    "decoder_input_ids": Refusal(_NO_ENCODER, (None,)),
    "encoder_outputs": Refusal("the model reads the encoder's input itself; pass that", (None,)),
    "is_assistant": Refusal("this is the target's text; leave it out"),
    "assistant_tokenizer": Refusal(_UNIVERSAL, (None,)),
    "assistant_lookbehind": Refusal(_UNIVERSAL, (None, 10)),
    "target_lookbehind": Refusal(_UNIVERSAL, (None, 10)),
    "num_assistant_tokens_schedule": Refusal(
        "trees change by a policy, such as policy=AdaptiveThreshold(); leave it out", (None, "constant")
    ),
    "assistant_early_exit": Refusal(_ITSELF, (None,)),
    "assistant_ensemble_weight": Refusal(_ITSELF, (None,)),
    "speculation_type": Refusal(_ITSELF, (None,)),
    "use_mtp": Refusal(_ITSELF),
}
"""What would change the text, or ask for what polydraft does not have, by name."""

FLAGS = ("output_scores", "output_logits", "return_dict_in_generate")
"""Arguments that are asked whether they are set."""

OF_A_CALL_THAT_ENDS: Mapping[str, Refusal] = {
    "streamer": Refusal("iterate over the run, which yields tokens as they come", (None,)),
    "return_dict_in_generate": Refusal("a run has its statistics itself; leave it out"),
    "output_scores": Refusal("a run does not keep scores; call polydraft.generate"),
    "output_logits": Refusal("a run does not keep logits; call polydraft.generate"),
}
"""What `stream` refuses beside: it returns before there is an output."""

OF_ONE_CALL: Mapping[str, Refusal] = {
    "streamer": Refusal("texts of many prompts come as they end; iterate over the run", (None,)),
    "attention_mask": Refusal("every prompt is a row of its own without padding; leave it out", (None,)),
    "inputs": Refusal("pass the prompts as the second argument", (None,)),
    "input_ids": Refusal("pass the prompts as the second argument", (None,)),
    "num_return_sequences": Refusal("give a prompt several names to continue it several times", (None, 1)),
    "return_dict_in_generate": Refusal("every text comes as a Completed; leave it out"),
    "output_scores": Refusal("scores of many prompts are not kept; call polydraft.generate"),
    "output_logits": Refusal("logits of many prompts are not kept; call polydraft.generate"),
    "assistant_model": Refusal("pass it as drafter=", (None,)),
    "past": Refusal("a past is of one text; call polydraft.generate", (None,)),
    "keep_past": Refusal("a past is of one text; call polydraft.generate"),
}
"""What `generate_many` refuses beside: it belongs to one call with one tensor of prompts."""


def check_arguments(
    model: PreTrainedModel, options: Mapping[str, Any], besides: Mapping[str, Refusal] | None = None
) -> None:
    """Check that every argument of a call is one that is honoured.

    Args:
        model: the target, whose inputs are told from slips of the pen.
        options: the arguments by name.
        besides: further refusals of this call.

    Raises:
        InvalidParameter: an argument that asks for what polydraft does not do, is another input of the model, or is
            unknown.
    """
    known, own = {**REFUSED, **(besides or {})}, own_inputs(model)
    for name, value in options.items():
        refusal = None if name in OF_DECODERS & own else known.get(name)
        if refusal is not None:
            _check(name, value, refusal)
        elif name not in HONOURED | WITH_TOKENS | own and value is not None:
            raise InvalidParameter(_unknown(model, name))
    for name in FLAGS:
        asked_for(name, options.get(name))
    guided = options.get("guidance_scale")
    guided = getattr(options.get("generation_config"), "guidance_scale", None) if guided is None else guided
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if options.get(name) is not None and (guided is None or (isinstance(guided, int | float) and guided == 1)):
            raise InvalidParameter(f"{name} needs guidance_scale, which says how much it counts.")


def asked_for(name: str, value: object) -> bool:
    """Return whether a flag is set; None counts as not.

    Raises:
        InvalidParameter: the value is neither True nor False.
    """
    if value is not None and not (isinstance(value, int) and value in (0, 1)):
        raise InvalidParameter(f"{name} must be True or False, but is {shown(value)}.")
    return bool(value)


def check_config(given: GenerationConfig | None, own: GenerationConfig | None, *, encodes: bool = False) -> None:
    """Check that configurations ask for nothing that is refused.

    Of the model's own configuration only what shapes the text counts: it may name caches and the like, which polydraft
    has its own of. What a given configuration repeats of the model's own counts as the model's.

    Raises:
        InvalidParameter: a field asks for what polydraft does not do; the text names it.
    """
    for name, refusal in REFUSED.items():
        if encodes and name in OF_DECODERS:
            continue
        shipped = getattr(own, name, None)
        if refusal.shapes_text:
            _check(name, shipped, refusal, "the model's generation_config")
        wanted = getattr(given, name, None)
        if refusal.shapes_text or not _same(wanted, shipped):
            _check(name, wanted, refusal, "generation_config")


def drafting_asked_for(options: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """Return what Hugging Face's arguments say of drafts: those of `DRAFTING` that are set.

    The lengths of drafts count only where the call itself or its generation_config names them.

    Raises:
        InvalidParameter: a number outside its range, or one of them without the other that it belongs to.
    """
    given = options.get("generation_config")
    asked = {name: _first(options.get(name), getattr(given, name, None)) for name in DRAFTING}
    asked["prompt_lookup_num_tokens"] = _first(asked["prompt_lookup_num_tokens"], own.prompt_lookup_num_tokens)
    for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
        require_count(name, asked[name])
    threshold = asked["assistant_confidence_threshold"]
    if threshold is not None and not (is_number(threshold) and 0 <= threshold <= 1):
        raise InvalidParameter(f"assistant_confidence_threshold must lie in 0 to 1, but is {shown(threshold)}.")
    for name, needed in DRAFTING.items():
        if asked[name] is not None and needed and asked[needed] is None and name in options:
            raise InvalidParameter(f"{name} needs {needed}, or say it by drafter= and policy=.")
    return {name: value for name, value in asked.items() if value is not None}


def require_count(name: str, value: object) -> None:
    """Check that a number is a whole one from 1 on, or None.

    Raises:
        InvalidParameter: it is something else.
    """
    if value is not None and not (is_whole(value) and cast(int, value) >= 1):
        raise InvalidParameter(f"{name} must be an integer of at least 1, but is {shown(value)}.")


def _first(*values: Any) -> Any:
    return next((one for one in values if one is not None), None)


def _check(name: str, value: Any, refusal: Refusal, place: str = "") -> None:
    if not any(_same(value, off) for off in refusal.off):
        where = f" of {place}" if place else ""
        said = shown(value)
        written = f"<{said.removeprefix('of type ')}>" if said.startswith("of type ") else said
        raise InvalidParameter(f"{name}={written}{where} is refused: {refusal.reason}.")


def _same(value: Any, other: Any) -> bool:
    """Tell whether two values are equal, tensors and other things without a plain answer never."""
    if value is other:
        return True
    plain = (bool, int, float, str, list, tuple)
    return isinstance(value, plain) and isinstance(other, plain) and value == other


def _unknown(model: PreTrainedModel, name: str) -> str:
    """Return what is to be said of an argument that nobody knows."""
    if name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL:
        return f"{name} is more than text, but {type(model).__name__} reads text alone; leave it out."
    prepares = inspect.signature(cast(Any, model).prepare_inputs_for_generation).parameters
    if name in {*inspect.signature(model.forward).parameters, *prepares}:
        return f"{name} is an input of the model beside its tokens, which polydraft does not hand on; leave it out."
    near = get_close_matches(name, [*HONOURED, *OURS], n=1)
    return f"There is no argument {name!r}" + (f"; did you mean {near[0]}?" if near else "; leave it out.")
