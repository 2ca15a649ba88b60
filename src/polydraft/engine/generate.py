"""The public calls: `generate` and `stream`, with Hugging Face's generation arguments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Int
from torch import Generator, Tensor, nn

from polydraft.drafters import Drafter, NoDraft
from polydraft.engine.choices import (
    Choices,
    check_crowd,
    check_reads,
    chosen_method,
    with_hugging_faces_words,
)
from polydraft.engine.output import GenerationOutput, Logprob, Past, emitted_rows, in_steps
from polydraft.engine.run import Run, Setup
from polydraft.engine.target_law import Ending, JointCriteria, TargetLaw
from polydraft.errors import InvalidParameter, is_whole, shown
from polydraft.models import (
    OF_A_CALL_THAT_ENDS,
    RANKS,
    CompiledModel,
    HuggingFaceModel,
    MirroredModel,
    Prepared,
    Refusal,
    as_hugging_faces,
    check_arguments,
    check_config,
    check_made_inside,
    drafting_asked_for,
    is_prepared,
    main_input,
    prepare_by_hugging_face,
    prompts_of,
    sources_of,
    take_apart,
    warn_of_serial,
)
from polydraft.probs import Noise
from polydraft.reading import Text
from polydraft.trees import TreePolicy, TreeShape
from polydraft.verifiers import NodeVerifier, TreeVerifier


@runtime_checkable
class Streamer(Protocol):
    """Hugging Face's streamer interface: the prompt first, then new tokens as they come."""

    def put(self, value: Tensor) -> None:
        """Take tokens."""
        ...

    def end(self) -> None:
        """Know that the text is complete."""
        ...


def generate(
    model: nn.Module,
    input_ids: Int[Tensor, "b t"] | Mapping[str, Any] | Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    drafter: Drafter | nn.Module | str | Path | None = None,
    verifier: TreeVerifier | NodeVerifier | str | None = None,
    policy: TreePolicy | TreeShape | Sequence[int] | str | int | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    streamer: Streamer | None = None,
    compile: bool = False,
    past: Past | None = None,
    keep_past: bool = False,
    output_logprobs: int | None = None,
    prediction: str | Sequence[int] | Sequence[Sequence[int]] | None = None,
    time: bool = False,
    inputs_tensor: Tensor | None = None,
    **options: Any,
) -> GenerationOutput | Tensor:
    """Generate text with exactly the model's distribution, faster where drafts are accepted.

    Also works as `model.generate(input_ids, custom_generate=polydraft.generate, drafter=..., ...)`, and then returns
    what `model.generate` does: a tensor, or with `return_dict_in_generate=True` an output of Hugging Face's class, with
    what else there is as attributes. Hugging Face hands neither `streamer` nor `assistant_model` nor `stop_strings`
    with `tokenizer` on to such a function, which cannot see that they were given: use the direct call for these.

    Every argument of Hugging Face's `generate` is honoured exactly or refused by name. A temperature without `top_k`
    keeps Hugging Face's default of 50 tokens, where the command line keeps all; `statistics.in_force` says what held.

    A logits processor that keeps state between calls is copied wherever paths of the tree part. It may say what it is
    by `stateless = True` or a method `fork()`; otherwise it is tried out on the prompt, by copies. One that cannot be
    copied serves one row, which is decoded without drafts, with a warning.

    Args:
        model: a Hugging Face model that writes text, the target: a decoder, or an encoder-decoder.
        input_ids: prompts, which an encoder-decoder's encoder reads, under the name that its processor has for them,
            such as `input_features`; with `attention_mask`, left- or right-padded. Also what a tokenizer or
            `apply_chat_template` returns: a mapping that has both, of tensors or lists, or a prompt's list of tokens.
        drafter: a drafter, or a draft model with the same tokens, its folder or hub name, or a word such as "ngram" or
            "suffix:FOLDER"; "none" decodes plainly. None is "merge", and "route" above temperature 0. Hugging Face's
            `assistant_model` and `prompt_lookup_num_tokens` are other words for it.
        verifier: the rule that keeps drafts, or its word on the command line such as "optimal"; a rule for single nodes
            is applied from the root down. None is the one that accepts most (see `default_verifier`).
        policy: the shape of the token trees: a policy, a `TreeShape`, text as for `parse_policy`, children per depth,
            or the length of a chain; None is a measured default.
        seed: fixes the text; without seed and generator the text depends on torch's global random state.
        generator: the random state to use instead of a seed.
        streamer: gets the prompt and then new tokens as they come; one row only. Its `end` is called in any case.
        past: what an earlier run or call with keep_past=True has as its past: their common beginning is not read again.
            One row only. The text is the same as without it, up to rounding.
        keep_past: keep what the models know of the text, for the next call. It takes the memory of their caches.
        output_logprobs: return the model's own log-probability of every new token, before processors and filters, and
            those of so many of the likeliest tokens; 0 for the token's own alone.
        prediction: what the answer will resemble, as in edits: tokens, of all rows or of each, or a text with
            `tokenizer`. It is drafted first, and counted in `statistics.sources`; the law of the text stays.
        time: on a GPU, time the parts of every step too, which waits for the device once a step.
        compile: run short passes of target and draft model as compiled code; every new shape takes seconds to a minute.
        inputs_tensor: what an encoder read, handed over by `model.generate`; not for direct calls.
        **options: Hugging Face's, such as max_new_tokens and temperature, which above 0 turns sampling on and at 0 off;
            with tokenizer, stop_strings; and `grammar`, a `Grammar` that the text is to follow (`Grammar.json_schema`).

    Raises:
        InvalidParameter: an argument outside its range, refused or unknown, an empty prompt, a streamer for several
            rows, or a processor that cannot be run.
        CheckpointError: a draft model's folder that cannot be loaded.
        ContextOverflow: a prompt that leaves no room for a token.
        UnpairedScheme: a drafter that cannot draft as the verifier needs.
        UnsupportedModel: a model that cannot score trees.
        VocabularyMismatch: a draft model with other tokens.
        InvalidProbabilities: NaN or infinite logits.
    """
    with _ended_in_any_case(streamer):
        choices = Choices(drafter, verifier, policy, seed, generator, compile, past, keep_past, output_logprobs, time)
        if prediction is not None:
            choices = replace(choices, prediction=predicted_tokens(prediction, options.get("tokenizer")))
        if is_prepared(options):
            return _decoded(model, input_ids, choices, {**options, "inputs_tensor": inputs_tensor}, streamer)
        if inputs_tensor is not None:
            raise InvalidParameter("inputs_tensor is what model.generate hands to decoding methods; pass input_ids.")
        return _finish(*_run(model, input_ids, choices, options, {}), streamer)


def _decoded(
    model: nn.Module, input_ids: Any, choices: Choices, options: dict[str, Any], streamer: Streamer | None
) -> Any:
    """Be the decoding method of `model.generate`, and return what it expects of one."""
    config = options["generation_config"]
    _check_returned(config, keep_past=choices.keep_past, output_logprobs=choices.output_logprobs is not None)
    run, prepared = _run_inside(model, input_ids, choices, options)
    output = _finish(run, prepared, streamer)
    if not config.return_dict_in_generate:
        return output.sequences
    return as_hugging_faces(dict(output.items()), encodes=run.setup.target.facts.encodes)


def stream(
    model: nn.Module,
    input_ids: Int[Tensor, "b t"] | Mapping[str, Any] | Sequence[int] | Sequence[Sequence[int]] | None = None,
    *,
    drafter: Drafter | nn.Module | str | Path | None = None,
    verifier: TreeVerifier | NodeVerifier | str | None = None,
    policy: TreePolicy | TreeShape | Sequence[int] | str | int | None = None,
    seed: int | None = None,
    generator: Generator | None = None,
    compile: bool = False,
    past: Past | None = None,
    keep_past: bool = False,
    output_logprobs: int | None = None,
    prediction: str | Sequence[int] | Sequence[Sequence[int]] | None = None,
    time: bool = False,
    **options: Any,
) -> Run:
    """Start a generation and return it as an iterator of blocks; arguments and errors are those of `generate`.

    Each block tells what every row gained in one step, which of it was drafted, and the tree it came from. A streamer,
    `output_scores` and the like belong to a call that ends with an output, and are refused.
    """
    choices = Choices(drafter, verifier, policy, seed, generator, compile, past, keep_past, output_logprobs, time)
    if prediction is not None:
        choices = replace(choices, prediction=predicted_tokens(prediction, options.get("tokenizer")))
    run, _ = _run(model, input_ids, choices, options, OF_A_CALL_THAT_ENDS)
    return run


def target_model(model: nn.Module, *, compile: bool = False) -> HuggingFaceModel:
    """Return the target as the engine runs it: the model's own code, compiled if asked.

    Raises:
        InvalidParameter: torch puts new tensors on another device than the CPU, where the engine's own are; or a target
            over several ranks is to be compiled.
    """
    usual = torch.get_default_device()
    if usual.type != "cpu":
        raise InvalidParameter(
            f"torch's default device is {usual}, and polydraft keeps its own numbers on the CPU; leave "
            "torch.set_default_device out and put the models on their device by model.to."
        )
    if getattr(model, RANKS, None) is None:
        return CompiledModel(model) if compile else HuggingFaceModel(model)
    if compile:
        raise InvalidParameter("A target over several ranks is not compiled; leave compile out.")
    return MirroredModel(model)


def _run(
    model: nn.Module, input_ids: object, choices: Choices, options: dict[str, Any], besides: Mapping[str, Refusal]
) -> tuple[Run, Prepared]:
    """Let Hugging Face prepare a call from outside, and build its run."""
    target = target_model(model, compile=choices.compile)
    prompts, options = prompts_of(input_ids, options, main_input(target.model))
    check_arguments(target.model, options, besides)
    choices = with_hugging_faces_words(choices, drafting_asked_for(options, target.model.generation_config))

    def take(_: nn.Module, input_ids: Int[Tensor, "b t"], **given: Any) -> tuple[Run, Prepared]:
        return _run_prepared(target, input_ids, choices, **given)

    return prepare_by_hugging_face(model, prompts, take, options, besides)


def _run_inside(model: nn.Module, input_ids: Any, choices: Choices, options: dict[str, Any]) -> tuple[Run, Prepared]:
    """Build the run of a call from inside `model.generate`, which knows no longer what was given and what is usual."""
    config, target = options["generation_config"], target_model(model, compile=choices.compile)
    check_config(None, config, encodes=target.encodes)
    check_made_inside(target.model, input_ids, options)
    choices = with_hugging_faces_words(choices, drafting_asked_for({}, config))
    return _run_prepared(target, input_ids, choices, **options)


def _run_prepared(
    target: HuggingFaceModel,
    input_ids: Int[Tensor, "b t"],
    choices: Choices,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    inputs_tensor: Tensor | None = None,
    **inputs: Any,
) -> tuple[Run, Prepared]:
    """Build the run from what `model.generate` prepared.

    `inputs` are the model's inputs, the mask among them, and `inputs_tensor` is what an encoder read.
    """
    mask = inputs.get("decoder_attention_mask" if target.encodes else "attention_mask")
    sources = sources_of(target, input_ids, inputs, inputs_tensor)
    prepared = take_apart(input_ids, logits_processor, stopping_criteria, mask, generation_config, target.vocab_size)
    if choices.prediction is not None:
        check_predictions(choices.prediction, len(input_ids), target.vocab_size)
    method = chosen_method(choices, target, prepared.params)
    check_reads(method.drafter, target, sources)
    check_crowd(target, method.drafter, together=len(input_ids) > 1, past=choices.past is not None)
    reason, endings = warn_of_serial(prepared.processors[0]), row_endings(prepared, target.context)
    if prepared.together:
        lengths, scored = prepared.lengths.tolist(), prepared.wants_scores
        together = JointCriteria(prepared.together, prepared.input_ids, lengths, prepared.pad, scored=scored)
        endings = tuple(replace(one, together=together) for one in endings)
    setup = Setup(
        target=target,
        method=replace(method, drafter=NoDraft()) if reason else method,
        prompt=Text(prepared.tokens, prepared.lengths),
        laws=row_laws(prepared),
        endings=endings,
        keeps_scores=prepared.wants_scores or prepared.wants_logits,
        fallback=reason,
        past=choices.past,
        keeps_past=choices.keep_past,
        logprobs=choices.output_logprobs,
        time=choices.time,
        sources=sources,
    )
    return Run(setup, _noise(choices.seed, choices.generator, len(input_ids))), prepared


def row_laws(prepared: Prepared) -> tuple[TargetLaw, ...]:
    """Return each row's law."""
    paddings = prepared.padding or (None,) * len(prepared.lengths)
    return tuple(
        TargetLaw(prepared.params, tuple(own), padding, prepared.eos)
        for own, padding in zip(prepared.processors, paddings, strict=True)
    )


def row_endings(prepared: Prepared, context: int) -> tuple[Ending, ...]:
    """Give every row the same number of new tokens, as far as the context reaches."""
    new = prepared.max_length - prepared.input_ids.shape[1]
    paddings = prepared.padding or (None,) * len(prepared.lengths)
    return tuple(
        Ending(min(length + new, context), length + new > context, prepared.eos, own, padding)
        for length, own, padding in zip(prepared.lengths.tolist(), prepared.criteria, paddings, strict=True)
    )


def _noise(seed: int | None, generator: Generator | None, rows: int) -> Noise:
    if seed is not None and generator is not None:
        raise InvalidParameter("seed and generator both fix the text; give one of them.")
    if generator is not None and not isinstance(generator, Generator):
        raise InvalidParameter(f"generator must be a torch.Generator, but is of type {type(generator).__name__}.")
    if seed is None:
        device = generator.device if generator is not None else None
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise InvalidParameter(f"seed must be an integer >= 0 and below 2^63, but is {shown(seed)}.")
    return Noise.from_seed(seed, rows)


def _check_returned(config: Any, **asked: bool) -> None:
    """Check that what is asked for beside the tokens can be returned."""
    for name, is_asked in asked.items():
        if is_asked and not config.return_dict_in_generate:
            raise InvalidParameter(f"{name} needs return_dict_in_generate=True here: a tensor holds tokens alone.")


@contextmanager
def _ended_in_any_case(streamer: Streamer | None) -> Iterator[None]:
    """Tell a streamer that nothing more comes, also after an error: who reads from it would wait forever."""
    if streamer is not None and (isinstance(streamer, type) or not isinstance(streamer, Streamer)):
        raise InvalidParameter(f"streamer must have the methods put and end, but is {shown(streamer)}.")
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


def _finish(run: Run, prepared: Prepared, streamer: Streamer | None) -> GenerationOutput:
    rows = len(prepared.input_ids)
    logits: list[list[Tensor]] = [[] for _ in range(rows)]
    scores: list[list[Tensor]] = [[] for _ in range(rows)]
    logprobs: list[list[Logprob]] = [[] for _ in range(rows)]
    if streamer is not None:
        if rows > 1:
            raise InvalidParameter(f"A streamer takes one row, but there are {rows}.")
        streamer.put(prepared.input_ids.cpu())
    for block in run:
        if streamer is not None and block.rows:
            streamer.put(torch.tensor(block.rows[0].tokens))
        for row, (own_logits, own_scores) in emitted_rows(block, run.setup.laws).items():
            logits[row].append(own_logits)
            scores[row].append(own_scores)
        for row, gained in block.rows.items():
            logprobs[row] += gained.logprobs
    return GenerationOutput(
        run.sequences(prepared.input_ids, prepared.pad),
        run.statistics,
        tuple(run.finish),
        in_steps(scores) if prepared.wants_scores else None,
        in_steps(logits) if prepared.wants_logits else None,
        run.past,
        None if run.setup.logprobs is None else tuple(map(tuple, logprobs)),
        verifier=run.statistics.verifier,
        lossless=run.statistics.lossless,
    )


def predicted_tokens(prediction: object, tokenizer: Any) -> tuple[Any, ...]:
    """Return a prediction as tokens, of all rows or of each.

    Args:
        prediction: a text, tokens, or tokens for each row.
        tokenizer: makes tokens of a text; None if the call has none.

    Raises:
        InvalidParameter: it is something else, or a text, and the tokenizer is missing or none.
    """
    if isinstance(prediction, str):
        if tokenizer is None:
            raise InvalidParameter("prediction is a text, for which tokenizer is missing; give it, or token ids.")
        if not callable(cast(object, tokenizer)):
            raise InvalidParameter(f"tokenizer must be the target's tokenizer, but is {shown(tokenizer)}.")
        return _row(tokenizer(prediction, add_special_tokens=False)["input_ids"])
    given = prediction.tolist() if isinstance(prediction, Tensor) else prediction
    if isinstance(given, Sequence) and given and all(isinstance(one, Sequence | Tensor) for one in given):
        return tuple(_row(one) for one in given)
    return _row(given)


def check_predictions(prediction: Any, rows: int, vocab_size: int) -> None:
    """Check that there is one prediction for all rows, or one for each, of tokens that the target has.

    Raises:
        InvalidParameter: there is another number of them, or a token is none of the target's.
    """
    nested = isinstance(prediction[0], tuple)
    most = max(map(max, prediction if nested else (prediction,)))
    if most >= vocab_size:
        raise InvalidParameter(
            f"prediction has the token {shown(most)}, but the target has {vocab_size} tokens; give a text of the "
            "target's own tokenizer."
        )
    if nested and len(prediction) != rows:
        raise InvalidParameter(
            f"There are {len(prediction)} predictions for {rows} rows; give one for all, or one for each."
        )


def _row(given: Any) -> tuple[int, ...]:
    """Return one row's tokens."""
    tokens: Any = given.tolist() if isinstance(given, Tensor) else given
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes)
    if not listed or not tokens or not all(is_whole(one) and int(one) >= 0 for one in tokens):
        raise InvalidParameter(f"prediction must be a text or token ids, at least one, but is {shown(given)}.")
    return tuple(int(one) for one in tokens)
