"""How engines are asked for texts and what they answer: which address, which fields, and where the tokens stand.

Every field that changes the law is sent, whatever an engine's default is: llama.cpp and Ollama cut to top-k 40 and
min-p .05 by themselves, vLLM and SGLang take what `generation_config.json` says. Shapes are those that the engines
document; docs/conformance_http.md says which were run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydraft.errors import InvalidParameter, ServerError, hint

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MOST_TOLD = 20
"""So many of the likeliest tokens every engine tells that tells any."""


@dataclass(frozen=True)
class SampleRequest:
    """What is asked for: `count` texts behind one prompt.

    Args:
        model: its name at the server.
        prompt: token ids; none where only the text is known.
        text: the same as a text, for engines that take nothing else.
        count: texts in one answer.
        seed: of the first.
        length: new tokens of each.
        temperature, top_p, top_k: of the law; top_k 0 keeps all tokens.
        likeliest: how many of the likeliest tokens are told with each; None for no log-probabilities.
        message: what a user says, of which the server makes the prompt by its chat template; None for no chat.
    """

    model: str
    prompt: tuple[int, ...]
    text: str
    count: int
    seed: int
    length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    likeliest: int | None = None
    message: str | None = None


@dataclass(frozen=True)
class ToldToken:
    """A token as log-probabilities tell it: its id or its bytes, and the likeliest in its place."""

    logprob: float
    id: int | None = None
    spelling: bytes = b""
    likeliest: tuple[float, ...] = ()


@dataclass(frozen=True)
class SampledText:
    """A text as an engine tells it.

    Args:
        text: as text.
        tokens: its token ids, where they are told; else None.
        told: its log-probabilities, where they are.
        stopped: whether it ended by itself, before it had all its tokens.
        prompt_tokens: how many tokens the prompt had at the server, if it says so.
    """

    text: str
    tokens: tuple[int, ...] | None = None
    told: tuple[ToldToken, ...] = ()
    stopped: bool = False
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Engine:
    """How one engine is asked.

    Args:
        name: its word.
        path: the address of requests.
        fields: the body of a request.
        texts: the texts of an answer.
        owner: what `/v1/models` says of who owns its models; "" where that tells nothing.
        takes_tokens: whether a prompt may be token ids.
        most: texts in one answer.
        goes_on: whether it is told to go on behind the end of a text, without ruling it out.
        chat_fields: what chats are sent beside OpenAI's fields; None where nothing turns the engine's own filters off.
    """

    name: str
    path: str
    fields: Callable[[SampleRequest], dict[str, Any]]
    texts: Callable[[Any], list[SampledText]]
    owner: str = ""
    takes_tokens: bool = True
    most: int = 1
    goes_on: bool = False
    chat_fields: Callable[[SampleRequest], dict[str, Any]] | None = None


def _common(asked: SampleRequest) -> dict[str, Any]:
    told = {} if asked.likeliest is None else {"logprobs": asked.likeliest}
    return {
        "model": asked.model,
        "max_tokens": asked.length,
        "seed": asked.seed,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        **told,
    }


def _several(asked: SampleRequest) -> dict[str, Any]:
    return {**_common(asked), "prompt": asked.text, "n": asked.count}


def _vllm(asked: SampleRequest) -> dict[str, Any]:
    return {**_several(asked), "prompt": list(asked.prompt) or asked.text, **_vllm_law(asked), "return_token_ids": True}


def _vllm_chat(asked: SampleRequest) -> dict[str, Any]:
    return {**_vllm_law(asked), "return_token_ids": True}


def _vllm_law(asked: SampleRequest) -> dict[str, Any]:
    """Return what vLLM and SGLang call alike in OpenAI's shapes."""
    return {
        "top_k": asked.top_k or -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


def _sglang(asked: SampleRequest) -> dict[str, Any]:
    sampling = {
        "n": asked.count,
        "max_new_tokens": asked.length,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k or -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    told = {} if asked.likeliest is None else {"return_logprob": True, "top_logprobs_num": asked.likeliest}
    prompt = {"input_ids": list(asked.prompt)} if asked.prompt else {"text": asked.text}
    return {**prompt, "sampling_params": sampling, **told}


def _off(asked: SampleRequest) -> dict[str, Any]:
    """Return what llama.cpp and Ollama call alike: they cut and penalise unless they are told not to."""
    return {
        "seed": asked.seed,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "mirostat": 0,
    }


def _llama_cpp(asked: SampleRequest) -> dict[str, Any]:
    return {
        **_llama_cpp_law(asked),
        "prompt": list(asked.prompt) or asked.text,
        "n_predict": asked.length,
        "return_tokens": True,
        "n_probs": asked.likeliest or 0,
    }


def _llama_cpp_law(asked: SampleRequest) -> dict[str, Any]:
    return {**_off(asked), "dynatemp_range": 0.0, "dry_multiplier": 0.0, "xtc_probability": 0.0}


def _ollama(asked: SampleRequest) -> dict[str, Any]:
    return {
        "model": asked.model,
        "prompt": asked.text,
        "raw": True,
        "stream": False,
        "logprobs": True,  # whose pieces tell the tokens
        "top_logprobs": asked.likeliest or 0,
        "options": {**_off(asked), "num_predict": asked.length},
    }


def _transformers(asked: SampleRequest) -> dict[str, Any]:
    config = {
        "do_sample": asked.temperature > 0,
        "max_new_tokens": asked.length,
        "top_k": asked.top_k,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    return {**_common(asked), "prompt": asked.text, "stream": False, "generation_config": json.dumps(config)}


def _chat(more: Callable[[SampleRequest], dict[str, Any]]) -> Callable[[SampleRequest], dict[str, Any]]:
    """Return the body of chats: log-probabilities always, whose pieces tell the tokens where nothing else does."""

    def fields(asked: SampleRequest) -> dict[str, Any]:
        told = {"messages": [{"role": "user", "content": asked.message}], "n": asked.count, "logprobs": True}
        return {**_common(asked), **told, "top_logprobs": asked.likeliest or 0, **more(asked)}

    return fields


def _choices(answer: Any) -> list[SampledText]:
    """Read OpenAI's shape, with vLLM's tokens where they are there."""
    usage = answer.get("usage") or {}
    found = sorted(answer["choices"], key=lambda one: int(one.get("index", 0)))
    return [
        SampledText(
            str(one["text"]),
            tuple(int(token) for token in one["token_ids"]) if one.get("token_ids") is not None else None,
            _told(one.get("logprobs") or {}),
            one.get("finish_reason") == "stop",
            usage.get("prompt_tokens"),
        )
        for one in found
    ]


def _chat_texts(answer: Any) -> list[SampledText]:
    """Read OpenAI's shape of chats, with vLLM's tokens where they are there."""
    usage = answer.get("usage") or {}
    return [
        SampledText(
            str(one["message"].get("content") or ""),
            tuple(int(token) for token in one["token_ids"]) if one.get("token_ids") is not None else None,
            _by_pieces((one.get("logprobs") or {}).get("content") or ()),
            one.get("finish_reason") == "stop",
            usage.get("prompt_tokens"),
        )
        for one in sorted(answer["choices"], key=lambda one: int(one.get("index", 0)))
    ]


def _by_pieces(told: Sequence[Any]) -> tuple[ToldToken, ...]:
    """Read log-probabilities that stand one by one with their piece and its bytes."""
    return tuple(
        ToldToken(
            float(one["logprob"]),
            None,
            bytes(one["bytes"]) if one.get("bytes") else str(one["token"]).encode(),
            _numbers(top["logprob"] for top in one.get("top_logprobs") or ()),
        )
        for one in told
    )


def _told(logprobs: Mapping[str, Any]) -> tuple[ToldToken, ...]:
    values, pieces = logprobs.get("token_logprobs") or (), logprobs.get("tokens") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(values)
    return tuple(
        ToldToken(float(value), None, str(piece).encode(), _numbers((top or {}).values()))
        for value, piece, top in zip(values, pieces, tops, strict=True)
    )


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(one) for one in values)


def _sglang_texts(answer: Any) -> list[SampledText]:
    found = list[SampledText]()
    for one in answer if isinstance(answer, list) else [answer]:
        meta = one["meta_info"]
        told: Sequence[Any] = meta.get("output_token_logprobs") or ()
        tops: Sequence[Any] = meta.get("output_top_logprobs") or ()
        likeliest = [_numbers(value for value, *_ in top or ()) for top in tops] or [()] * len(told)
        read = (
            ToldToken(float(value), int(token), b"", top)
            for (value, token, *_), top in zip(told, likeliest, strict=True)
        )
        finish = meta.get("finish_reason") or {}
        reason = finish.get("type") if isinstance(finish, Mapping) else finish
        ids = tuple(int(token) for token in one["output_ids"])
        found.append(SampledText(str(one["text"]), ids, tuple(read), reason == "stop", meta.get("prompt_tokens")))
    return found


def _llama_cpp_texts(answer: Any) -> list[SampledText]:
    told = answer.get("completion_probabilities") or answer.get("probs") or ()
    read = tuple(
        ToldToken(float(one["logprob"]), int(one["id"]), b"", _numbers(top["logprob"] for top in one["top_logprobs"]))
        for one in told
    )
    ids = tuple(int(token) for token in answer["tokens"])
    stopped = answer.get("stop_type") in ("eos", "word")
    return [SampledText(str(answer["content"]), ids, read, stopped, answer.get("tokens_evaluated"))]


def _ollama_texts(answer: Any) -> list[SampledText]:
    read = _by_pieces(answer.get("logprobs") or ())
    stopped = answer.get("done_reason") == "stop"
    return [SampledText(str(answer["response"]), None, read, stopped, answer.get("prompt_eval_count"))]


ENGINES = (
    Engine("polydraft", COMPLETIONS, _vllm, _choices, "polydraft", most=128, goes_on=True, chat_fields=_vllm_chat),
    Engine("vllm", COMPLETIONS, _vllm, _choices, "vllm", most=128, goes_on=True, chat_fields=_vllm_chat),
    Engine("sglang", "/generate", _sglang, _sglang_texts, "sglang", most=16, goes_on=True, chat_fields=_vllm_law),
    Engine("llama.cpp", "/completion", _llama_cpp, _llama_cpp_texts, "llamacpp", chat_fields=_llama_cpp_law),
    Engine("ollama", "/api/generate", _ollama, _ollama_texts, "library", takes_tokens=False),
    Engine("transformers", COMPLETIONS, _transformers, _choices, takes_tokens=False),
    Engine("openai", COMPLETIONS, _several, _choices, takes_tokens=False, most=16, chat_fields=lambda _: {}),
)
"""All that are known; the last is any other server with OpenAI's completions."""
WORDS = tuple(one.name for one in ENGINES)


def engine_named(word: str) -> Engine:
    """Return the engine of a word.

    Raises:
        InvalidParameter: there is none.
    """
    found = next((one for one in ENGINES if one.name == word), None)
    if found is None:
        raise InvalidParameter(f"There is no engine {word!r}{hint(word, WORDS)}; use {', '.join(WORDS)}.")
    return found


def engine_of(cards: Sequence[Mapping[str, Any]]) -> Engine:
    """Return the engine whose models these are, as `/v1/models` lists them; else that of any server."""
    owners = {str(one.get("owned_by", "")) for one in cards}
    return next((one for one in ENGINES if one.owner and one.owner in owners), ENGINES[-1])


def chatting(engine: Engine) -> Engine:
    """Return how an engine is asked in chats.

    Raises:
        InvalidParameter: what it filters there by itself cannot be turned off.
    """
    if engine.chat_fields is None:
        raise InvalidParameter(
            f"Chats of {engine.name} take no field that turns its own filters off: leave --chat out, which tests the "
            "same model."
        )
    return replace(engine, path=CHATS, fields=_chat(engine.chat_fields), texts=_chat_texts, takes_tokens=False)


def read_texts(engine: Engine, answer: Any, count: int, where: str) -> list[SampledText]:
    """Return the texts of an answer.

    Raises:
        ServerError: it has not the shape of this engine, or another number of texts.
    """
    try:
        found = engine.texts(answer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ServerError(
            f"{where} does not answer as {engine.name} does ({what[:120]}): name another engine by --engine "
            f"({', '.join(WORDS)})."
        ) from error
    if len(found) != count:
        raise ServerError(f"{where} was asked for {count} texts and gave {len(found)}.")
    return found
