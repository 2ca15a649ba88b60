"""The public calls: `generate` and `stream`, with Hugging Face's generation arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Generator, Tensor, nn

from polydraft.drafters import Drafter, Text
from polydraft.engine.block import Statistics
from polydraft.engine.defaults import as_drafter, default_drafter, default_policy, default_verifier, target_model
from polydraft.engine.run import Run, Setup
from polydraft.engine.stopping import Limits
from polydraft.engine.target_law import TargetLaw
from polydraft.errors import InvalidParameter
from polydraft.models import Prepared, is_prepared, prepare_by_hugging_face, take_apart
from polydraft.probs import Noise, SamplingParams
from polydraft.trees import TreePolicy
from polydraft.verifiers import TreeVerifier


@runtime_checkable
class Streamer(Protocol):
    """Hugging Face's streamer interface: the prompt first, then new tokens as they come."""

    def put(self, value: Tensor) -> None:
        """Take tokens."""
        ...

    def end(self) -> None:
        """Know that the text is complete."""
        ...


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """What `generate` returns.

    Args:
        sequences: prompts and new tokens; finished rows are filled with the padding id.
        statistics: counts, acceptance and times.
        finish: per row, why it ended: "eos", "stop", "length", or "context" where the model's context cut it short.
    """

    sequences: Int[Tensor, "b s"]
    statistics: Statistics
    finish: tuple[str, ...]


def generate(
    model: nn.Module,
    input_ids: Int[Tensor, "b t"],
    *,
    drafter: Drafter | nn.Module | None = None,
    verifier: TreeVerifier | None = None,
    policy: TreePolicy | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    streamer: Streamer | None = None,
    compile: bool = False,
    **options: Any,
) -> GenerationOutput | Tensor:
    """Generate text with exactly the model's distribution, faster where drafts are accepted.

    Also works as `model.generate(input_ids, custom_generate=polydraft.generate, drafter=..., ...)`, and then returns
    what `model.generate` does: a tensor, or with `return_dict_in_generate=True` a `GenerationOutput`. Hugging Face
    does not hand `streamer`, `stop_strings` and `tokenizer` on to such a function; use the direct call for these.

    Args:
        model: a Hugging Face causal model, the target.
        input_ids: prompts; with `attention_mask`, left- or right-padded.
        drafter: a drafter, or a draft model with the same tokens; None is prompt lookup, which needs no model.
        verifier: the rule that keeps drafts; None is the one that accepts most (see `default_verifier`).
        policy: the shape of the token trees; None is a measured default.
        seed: fixes the text; without seed and generator the text depends on torch's global random state.
        generator: the random state to use instead of a seed.
        streamer: gets the prompt and then new tokens as they come; one row only. Its `end` is called in any case.
        compile: run short passes of target and draft model as compiled code (`CompiledModel`). Every new shape of tree
            and batch takes seconds to a minute once; a `Drafter` is taken as it is.
        **options: Hugging Face's generation arguments: max_new_tokens, temperature, top_k, top_p, min_p, typical_p,
            repetition_penalty, logits_processor, stopping_criteria, stop_strings with tokenizer, eos_token_id,
            num_return_sequences, attention_mask, generation_config and the others of its sampling mode. A
            temperature above 0 turns sampling on, 0 turns it off.

    Raises:
        InvalidParameter: an argument outside its range, an empty prompt, or a streamer for several rows.
        ContextOverflow: a prompt that leaves no room for a token.
        UnpairedScheme: a drafter that cannot draft as the verifier needs.
        UnsupportedModel: a model that cannot score trees.
        VocabularyMismatch: a draft model with other tokens.
        InvalidProbabilities: NaN or infinite logits.
    """
    choices = {
        "drafter": drafter,
        "verifier": verifier,
        "policy": policy,
        "seed": seed,
        "generator": generator,
        "compile": compile,
    }
    with _ended_in_any_case(streamer):
        if is_prepared(options):
            run, prepared = _run_prepared(model, input_ids, **choices, **options)
            output = _finish(run, prepared, streamer)
            return output if options["generation_config"].return_dict_in_generate else output.sequences
        take = partial(_run_prepared, **choices)
        run, prepared = prepare_by_hugging_face(model, input_ids, take, options)
        return _finish(run, prepared, streamer)


def stream(
    model: nn.Module,
    input_ids: Int[Tensor, "b t"],
    *,
    drafter: Drafter | nn.Module | None = None,
    verifier: TreeVerifier | None = None,
    policy: TreePolicy | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    compile: bool = False,
    **options: Any,
) -> Run:
    """Start a generation and return it as an iterator of blocks; arguments and errors are those of `generate`.

    Each block tells what every row gained in one step, which of it was drafted, and the tree it came from.
    """
    take = partial(
        _run_prepared,
        drafter=drafter,
        verifier=verifier,
        policy=policy,
        seed=seed,
        generator=generator,
        compile=compile,
    )
    run, _ = prepare_by_hugging_face(model, input_ids, take, options)
    return run


def _run_prepared(
    model: nn.Module,
    input_ids: Int[Tensor, "b t"],
    *,
    drafter: Drafter | nn.Module | None,
    verifier: TreeVerifier | None,
    policy: TreePolicy | None,
    seed: int | None,
    generator: Generator | None,
    compile: bool,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> tuple[Run, Prepared]:
    """Build the run from what `model.generate` prepared; `inputs` are the model's inputs, the mask among them."""
    prepared = take_apart(
        input_ids, logits_processor, stopping_criteria, inputs.get("attention_mask"), generation_config.pad_token_id
    )
    params = prepared.params if generation_config.do_sample else SamplingParams(temperature=0)
    chosen = as_drafter(drafter, compile=compile)
    target = target_model(model, compile=compile)
    if isinstance(drafter, nn.Module) and not (compile or policy or verifier):
        chosen = default_drafter(chosen, params, target.device)
    setup = Setup(
        target=target,
        drafter=chosen,
        verifier=verifier or default_verifier(chosen, params),
        policy=policy or default_policy(chosen, params),
        prompt=Text(prepared.tokens, prepared.lengths),
        laws=row_laws(prepared, params),
        limits=row_limits(prepared, target.context),
    )
    return Run(setup, _noise(seed, generator, len(input_ids))), prepared


def row_laws(prepared: Prepared, params: SamplingParams) -> tuple[TargetLaw, ...]:
    """Return each row's law."""
    paddings = prepared.padding or (None,) * len(prepared.lengths)
    return tuple(TargetLaw(params, own, padding) for own, padding in zip(prepared.processors, paddings, strict=True))


def row_limits(prepared: Prepared, context: int) -> tuple[Limits, ...]:
    """Give every row the same number of new tokens, as far as the context reaches."""
    new = prepared.max_length - prepared.input_ids.shape[1]
    paddings = prepared.padding or (None,) * len(prepared.lengths)
    return tuple(
        Limits(min(length + new, context), length + new > context, prepared.eos, prepared.criteria, padding)
        for length, padding in zip(prepared.lengths.tolist(), paddings, strict=True)
    )


def _noise(seed: int | None, generator: Generator | None, rows: int) -> Noise:
    if seed is None:
        device = generator.device if generator is not None else None
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
    return Noise.from_seed(seed, rows)


@contextmanager
def _ended_in_any_case(streamer: Streamer | None) -> Iterator[None]:
    """Tell a streamer that nothing more comes, also after an error: who reads from it would wait forever."""
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def _finish(run: Run, prepared: Prepared, streamer: Streamer | None) -> GenerationOutput:
    if streamer is not None:
        if len(prepared.input_ids) > 1:
            raise InvalidParameter(f"A streamer takes one row, but there are {len(prepared.input_ids)}.")
        streamer.put(prepared.input_ids.cpu())
    for block in run:
        if streamer is not None and block.rows:
            streamer.put(torch.tensor(block.rows[0].tokens))
    return GenerationOutput(run.sequences(prepared.input_ids, prepared.pad), run.statistics, tuple(run.finish))
