"""The public call: many prompts in one running batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from polydraft.drafters import Drafter, owned_models
from polydraft.engine.calls.choices import (
    Choices,
    chosen_method,
    with_hugging_faces_words,
)
from polydraft.engine.calls.fitting import check_crowd, check_drafting
from polydraft.engine.calls.output import checked_logprobs
from polydraft.engine.defaults import target_model
from polydraft.engine.loop.prefill import room_for
from polydraft.engine.many.asked import (
    LARGEST_SEED,
    Completed,
    Prompt,
    PromptRequest,
    asked_prompts,
    checked_prompt,
    longest_text,
    request_for,
    with_methods,
)
from polydraft.engine.many.many_run import ManyRun, ManySetup
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import InvalidParameter
from polydraft.models import (
    OF_DECODERS,
    OF_ONE_CALL,
    check_arguments,
    check_memory,
    drafting_asked_for,
    own_inputs,
    require_count,
)
from polydraft.trees import TreePolicy, TreeShape
from polydraft.verifiers import NodeVerifier, TreeVerifier


def generate_many(
    model: nn.Module,
    prompts: Mapping[Any, Prompt] | Sequence[Prompt] | Sequence[int] | Int[Tensor, "..."] | np.ndarray,
    *,
    batch_size: int = 8,
    drafter: Drafter | nn.Module | str | Path | None = None,
    verifier: TreeVerifier | NodeVerifier | str | None = None,
    policy: TreePolicy | TreeShape | Sequence[int] | str | int | None = None,
    seed: int | None = None,
    per_prompt: Mapping[Any, Mapping[str, Any]] | None = None,
    compile: bool = False,
    output_logprobs: int | None = None,
    time: bool = False,
    **options: Any,
) -> ManyRun:
    """Continue many prompts in one running batch, and return an iterator over the texts as they end.

    Every text is the one that its prompt gets alone with the seed that comes with it (`Completed.seed`), up to the
    rounding of a batch's arithmetic. That seed follows from `seed` and the prompt's name, so that the text does not
    depend on the other prompts, their order or the batch size.

    Args:
        model: a Hugging Face causal model, the target.
        prompts: token ids, as tensors or lists, by name, or a list of these, whose names are their places. Names are
            numbers or texts; the seeds of prompts with other names follow from their places. A prompt may also be what
            a tokenizer or `apply_chat_template` returns, and so may all of them together; padding is left out.
        batch_size: texts in progress at a time.
        drafter: as for `generate`.
        verifier: as for `generate`, where the default follows from the options of all prompts, not those of one.
        policy: likewise.
        seed: fixes the texts.
        per_prompt: by name, options that a prompt has instead of the common ones; `seed` among them is its own seed,
            and `drafter`, `verifier`, `policy` and `prediction` are its own too.
        output_logprobs: as for `generate`; a `Completed` has them.
        time: as for `generate`.
        compile: as for `generate`; the batch keeps its shape whatever joins and leaves.
        **options: Hugging Face's generation arguments, and `grammar`, also of one prompt in `per_prompt`.

    Raises:
        InvalidParameter: batch_size below 1 or too large for the memory, an option outside its range, or options for a
            prompt that there is not. A prompt that cannot be continued is no error of the run: it is yielded, with the
            reason, and if that is its length, first.
        UnpairedScheme: a drafter that cannot draft as the verifier needs.
    """
    require_count("batch_size", batch_size)
    choices = Choices(drafter, verifier, policy, compile=compile, output_logprobs=output_logprobs, time=time)
    target = target_model(model, compile=compile)
    check_arguments(target.model, options, OF_ONE_CALL)
    shared = sorted((own_inputs(target.model) - OF_DECODERS) & options.keys())
    if shared:
        raise InvalidParameter(f"{shared[0]} belongs to one prompt; give it with that prompt, as a mapping.")
    choices = with_hugging_faces_words(choices, drafting_asked_for(options, target.model.generation_config))
    start = int(torch.randint(LARGEST_SEED, ())) if seed is None else seed
    own_options = {} if per_prompt is None else per_prompt
    tried = [checked_prompt(target, one) for one in asked_prompts(target, prompts, start, own_options)]
    asked = tuple(one for one in tried if isinstance(one, PromptRequest))
    refused = tuple(one for one in tried if isinstance(one, Completed))
    token = torch.zeros(1, dtype=torch.int64, device=target.device)
    law = request_for(target, PromptRequest("", token, 0, {}), options).law if asked else TargetLaw()
    method = chosen_method(choices, target, law.params)
    asked = with_methods(asked, choices, target, law, method, options)
    every = [method, *(one.method for one in asked if one.method)]
    for one in every:
        check_crowd(target, one.drafter, together=True)
        check_drafting(one)
    size = min(batch_size, len(asked))
    capacity = longest_text(target, asked, options) + room_for(every)
    if asked:
        models = {id(model): model for one in every for model in owned_models(one.drafter)}
        check_memory([target, *models.values()], size, capacity)
    top = checked_logprobs(output_logprobs)
    return ManyRun(ManySetup(target, method, law, options, size, capacity, asked, refused, top, time))
