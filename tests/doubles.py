"""Small stand-ins for real models: random weights made from configurations, and a tokenizer built in memory."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

from polydraft import rows as states
from polydraft.drafters import Drafter, DraftRequest, Needs, Session, finished, is_sound
from polydraft.errors import InvalidParameter
from polydraft.models import HuggingFaceModel, LanguageModel, Layer
from polydraft.reading import Features, Reader, Scored, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Pieces, Verdict, Widths, causal_mask, topology, tree_mask

SPREAD = 0.6
"""Standard deviation of the random weights: large enough that the next-token laws are far from uniform."""

_ROTARY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
}
_GROUPED = {**_ROTARY, "num_attention_heads": 4, "num_key_value_heads": 2}

_KINDS: dict[str, tuple[type, type, dict[str, object]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, _GROUPED),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, _GROUPED),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, _ROTARY),
    "gpt2": (
        GPT2Config,
        GPT2LMHeadModel,
        {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 128,
            "initializer_range": SPREAD,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {**_GROUPED, "sliding_window": 12}),
    "mamba": (MambaConfig, MambaForCausalLM, {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}),
    "qwen3_5": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            **_GROUPED,
            "head_dim": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bloom": (BloomConfig, BloomForCausalLM, {"hidden_size": 8, "n_layer": 1, "n_head": 2}),
    "falcon": (FalconConfig, FalconForCausalLM, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}),
    "xlnet": (XLNetConfig, XLNetLMHeadModel, {"d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}),
    "t5": (T5Config, T5ForConditionalGeneration, {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}),
}

TREE_KINDS = ("llama", "gpt2", "gpt_neox", "qwen2")
"""Families that can score token trees."""


def tiny_model(
    kind: str = "llama",
    vocab: int = 24,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str | None = None,
    **changes: object,
) -> PreTrainedModel:
    """Return a random model of a family; the same arguments give the same weights. `attention` names the kernel."""
    config_class, model_class, settings = _KINDS[kind]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = config_class(vocab_size=vocab, **{**settings, **ids, **changes})
    if attention is not None:
        config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    return model.to(dtype).eval()


def perturbed(model: PreTrainedModel, scale: float, seed: int = 0) -> PreTrainedModel:
    """Return a copy whose weights differ by noise: a draft model that is right some of the time."""
    twin = copy.deepcopy(model)
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in twin.parameters():
            weights.add_(torch.randn(weights.shape, generator=stream, dtype=weights.dtype), alpha=scale)
    return twin


def broken(model: PreTrainedModel, value: float = float("nan")) -> PreTrainedModel:
    """Return a copy whose output weights are `value`, so that all its logits are unusable."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_output_embeddings().weight.fill_(value)
    return twin


def tiny_tokenizer(swap: tuple[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of printable ASCII with four merges; `swap` exchanges the ids of two tokens."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    merges = [("t", "h"), ("e", "r"), ("i", "n"), ("Ġ", "a")]
    tokens = ["<end>", *letters, *(left + right for left, right in merges)]
    ids = {token: index for index, token in enumerate(tokens)}
    if swap is not None:
        ids[swap[0]], ids[swap[1]] = ids[swap[1]], ids[swap[0]]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def plain_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits after the last of these tokens, by an ordinary pass without cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


OWN = "these tests run models by their own modules"


def fused(model: object) -> HuggingFaceModel:
    """Return a model that runs the fused pass; anything else is a failure."""
    made = HuggingFaceModel(model)
    if made.why_not_fused == OWN:
        pytest.skip(OWN)
    assert made.fused is not None, made.why_not_fused
    return made


@dataclass(frozen=True, eq=False)
class OverOneCache(Drafter):
    """Another model over the target's own slots, as a view with other weights is: it writes behind the text there."""

    model: LanguageModel
    name = "over one cache"
    needs = Needs(target=True)

    def check(self, scheme: Scheme) -> None: ...

    def start(self, text: Text, session: Session) -> None: ...

    def viewed(self, state: None, text: Text, target: Reader, room: int) -> tuple[Reader, None]:
        return replace(target.at(text), model=self.model, layers=()), state

    def commit(self, state: None, step: Step) -> None: ...


@contextmanager
def passes_of(model: object, note: Callable[[tuple[int, int]], object] = id) -> Iterator[list[tuple[int, int]]]:
    """Note rows and width of every pass of a model, whichever way it is run; hooks would keep it from being fused."""
    seen, usual = list[tuple[int, int]](), HuggingFaceModel.forward

    def forward(own: HuggingFaceModel, tokens: Tensor, *rest: Any, **named: Any) -> Any:
        if own.model is model:
            seen.append((len(tokens), tokens.shape[1]))
            note(seen[-1])
        return usual(own, tokens, *rest, **named)

    HuggingFaceModel.forward = forward
    try:
        yield seen
    finally:
        HuggingFaceModel.forward = usual


def scored(model: LanguageModel, lengths: list[int]) -> list[torch.Tensor]:
    """Score prompts of a vocabulary of 24, then two trees below them one by one, keeping a path of the first."""
    shape, device = Widths((2, 2)).shape, model.facts.device
    known = torch.tensor(lengths)
    batch, width, stream = len(lengths), max(lengths), torch.Generator().manual_seed(0)
    cache = model.new_cache(batch, width + 2 * shape.size + 2)

    def made(tokens: Tensor, places: Tensor, mask: Tensor, base: Tensor) -> Tensor:
        given = tokens.to(device), places.to(device), mask.to(device), cache
        return model.forward(*given, base if batch == 1 else base.to(device)).logits

    prompt = torch.randint(24, (batch, width), generator=stream)
    made(prompt, torch.arange(width).expand(batch, width), causal_mask(known, width), torch.zeros_like(known))
    view, found = topology(shape, batch, torch.device("cpu")), list[torch.Tensor]()
    for base in (known, known + 2):
        tokens = torch.randint(24, (batch, shape.size), generator=stream)
        mask = tree_mask(view.ancestors, base, int(base.max()) + shape.size)
        found.append(made(tokens, base.unsqueeze(-1) + view.depth, mask, base))
        path = torch.tensor([[2, 5]]).expand(batch, 2)
        cache.keep(base if batch == 1 else base.to(device), path.to(device))
    return found


def step_of(
    text: Text, draft: Draft, verdict: Verdict, vocab_size: int = 1, hidden: Mapping[Layer, int] | None = None
) -> Step:
    """Return the step of a draft for drafters that read hidden states, which are random, or likeliest tokens: all 0.

    Args:
        text: the committed text.
        draft: what was drafted.
        verdict: what was kept of it.
        vocab_size: width of the rows, which are zero.
        hidden: widths of the hidden states by layer; None for no states.
    """
    size = draft.tree.tokens.shape
    rows, drawn = torch.zeros(*size, vocab_size), torch.Generator().manual_seed(9)
    states = {layer: torch.randn(*size, width, generator=drawn).double() for layer, width in (hidden or {}).items()}
    riding = None if draft.riders is None else torch.zeros(*draft.riders.tokens.shape, vocab_size)
    return Step(text, draft.tree, Scored(rows, riding, states, {}), rows, verdict)


@dataclass(frozen=True)
class Count:
    """A drafter's state that knows how many rows there are, and no more."""

    rows: int

    def select(self, rows: Sequence[int]) -> "Count":
        """Return a state of so many rows."""
        return Count(len(rows))

    def put(self, row: int, other: "Count") -> "Count":
        """Return a state with one more row if it is behind the last."""
        return Count(self.rows + (row == self.rows))

    def cut(self, row: int, length: int) -> "Count":
        """Return the state as it is."""
        return self


@dataclass(frozen=True)
class Whole:
    """A drafter's state of whose rows none can be had by itself."""

    inner: Any

    def select(self, rows: Sequence[int]) -> "Whole":
        """Refuse.

        Raises:
            InvalidParameter: always.
        """
        raise InvalidParameter("This state has no row by itself.")

    def put(self, row: int, other: "Whole") -> "Whole":
        """Let the only row of another state join."""
        return replace(self, inner=states.put(self.inner, row, other.inner))

    def cut(self, row: int, length: int) -> "Whole":
        """Forget a row beyond a length."""
        return replace(self, inner=states.cut(self.inner, row, length))


class Unparted(Drafter):
    """Another drafter, but for its states, of which no row can be had by itself."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name = inner, inner.name
        self.needs = inner.needs

    @property
    def sound(self) -> bool:
        """Whether the other one is."""
        return is_sound(self.inner)

    def check(self, scheme: Scheme) -> None:
        """Pass the question on."""
        self.inner.check(scheme)

    def start(self, text: Text, session: Session) -> Whole:
        """Start the other one."""
        return Whole(self.inner.start(text, session))

    def read(self, state: Whole, text: Text, features: Features | None) -> Whole:
        """Let the other one read."""
        return replace(state, inner=self.inner.read(state.inner, text, features))

    def draft(self, state: Whole, request: DraftRequest) -> tuple[Draft | Pieces, Whole]:
        """Let the other one draft."""
        draft, after = self.inner.draft(state.inner, request)
        return draft, replace(state, inner=after)

    def commit(self, state: Whole, step: Step) -> Whole:
        """Tell the other one."""
        return replace(state, inner=self.inner.commit(state.inner, step))

    def finish(self, state: Whole, text: Text, row: int) -> Whole:
        """Tell the other one."""
        return replace(state, inner=finished(self.inner, state.inner, text, row))
