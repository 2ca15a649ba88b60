"""Whoever lends a model, a configuration or a process to a generation gets it back as it was."""

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
import torch
from doubles import broken, fused, perturbed, scored, tiny_model
from families import built
from torch import nn
from transformers import PreTrainedModel

import polydraft
from polydraft.errors import InvalidProbabilities
from polydraft.models import CompiledModel, HuggingFaceModel, Layer
from polydraft.models.anatomy import WATCHING, observed_layers, pack_linear_layers
from polydraft.models.checks.layout import evaluating, settings_of, sizes_of

PROMPT = torch.tensor([[3, 1, 4, 1, 5]])
NOTES = "polydraft_"
"""What is kept with a model, such as joined weights, has names that begin like this."""
DROPS = {"attention_dropout": 0.9}


def lent(seed: int = 0, **changes: object) -> PreTrainedModel:
    """Return a model in training, but for a layer that is not, with dropout, a hook, and weights partly frozen."""
    model = (
        tiny_model("gpt2", seed=seed, resid_pdrop=0.9, embd_pdrop=0.9, **changes) if changes else tiny_model(seed=seed)
    )
    model.train()
    next(one for one in model.modules() if isinstance(one, nn.ModuleList))[0].eval()
    next(model.parameters()).requires_grad_(False)
    return model


def windowed(kind: str) -> PreTrainedModel:
    """Return a model with windows, or chunks, of 12 tokens."""
    own = {
        "llama4_text": {
            "attention_chunk_size": 12,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 1, 1, 0],
        },
        "gpt_oss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    }
    return built(kind, own.get(kind, {"sliding_window": 12}))


def kept(thing: object) -> dict[str, object]:
    return {name: value for name, value in vars(thing).items() if not name.startswith(NOTES)}


def state_of(model: PreTrainedModel) -> dict[str, object]:
    """Return all of a model that others can see."""
    modules = dict(model.named_modules())
    return {
        "modes": {name: one.training for name, one in modules.items()},
        "attributes": {name: sorted(kept(one)) for name, one in modules.items()},
        "hooks": {name: (list(one._forward_hooks), list(one._forward_pre_hooks)) for name, one in modules.items()},
        "weights": {
            name: (one.data_ptr(), one._version, one.requires_grad, one.dtype, one.grad)
            for name, one in model.named_parameters()
        },
        "config": copy.deepcopy(vars(model.config)),
        "generation": copy.deepcopy(vars(model.generation_config)),
        "names": list(model.state_dict()),
    }


def state_of_process() -> tuple[object, ...]:
    """Return what generations could change, but for Python's own random state: the type checker draws from it."""
    return (
        torch.get_rng_state().tolist(),
        repr(np.random.get_state()),  # noqa: NPY002
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
    )


def generated(target: PreTrainedModel, draft: PreTrainedModel, **options: object) -> None:
    polydraft.generate(target, PROMPT, drafter=draft, max_new_tokens=8, **options)


def streamed(target: PreTrainedModel, draft: PreTrainedModel, **options: object) -> None:
    before = state_of(target), state_of(draft)
    for _ in polydraft.stream(target, PROMPT, drafter=draft, max_new_tokens=8, **options):
        assert (state_of(target), state_of(draft)) == before, "between two steps as well"


def many(target: PreTrainedModel, draft: PreTrainedModel, **options: object) -> None:
    list(polydraft.generate_many(target, [PROMPT[0], PROMPT[0, :3]], drafter=draft, max_new_tokens=8, **options))


@pytest.mark.parametrize("call", [generated, streamed, many])
@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("drops", [{}, {"attn_pdrop": 0.9}])
def test_models_and_process_are_as_before(
    call: Callable[..., None], temperature: float, drops: dict[str, float]
) -> None:
    target, draft = lent(**drops), lent(seed=1, **drops)
    before = state_of(target), state_of(draft)
    process = state_of_process()
    call(target, draft, temperature=temperature, seed=3)
    assert (state_of(target), state_of(draft)) == before
    assert state_of_process() == process


def test_without_a_seed_one_number_is_drawn() -> None:
    target, draft = lent(), lent(seed=1)
    torch.manual_seed(7)
    generated(target, draft, temperature=0.9)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    torch.randint(2**62, ())
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_in_training_writes_what_it_does_in_evaluation(kind: str) -> None:
    drops = {"attn_pdrop": 0.9, "resid_pdrop": 0.9, "embd_pdrop": 0.9} if kind == "gpt2" else DROPS
    model = tiny_model(kind, **drops)
    settings = {"temperature": 0, "max_new_tokens": 12}
    wanted = polydraft.generate(model, PROMPT, drafter=perturbed(model, 0.03), **settings).sequences
    found = polydraft.generate(model.train(), PROMPT, drafter=perturbed(model, 0.03).train(), **settings).sequences
    assert torch.equal(found, wanted)
    assert all(one.training for one in model.modules())


def test_after_an_error_too() -> None:
    target = broken(lent())
    before = state_of(target)
    with pytest.raises(InvalidProbabilities):
        generated(target, lent(seed=1), temperature=0)
    assert state_of(target) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_interruption_in_a_pass_too(error: type[BaseException]) -> None:
    target, calls = lent(), []

    def interrupt(layer: nn.Module, given: object) -> None:
        calls.append(layer.training)
        if len(calls) > 4:
            raise error("enough")

    HuggingFaceModel(target)
    setattr(interrupt, WATCHING, True)  # else the model would be tried anew
    target.model.norm.register_forward_pre_hook(interrupt)
    before = state_of(target)
    with pytest.raises(error, match="enough"):
        polydraft.generate(target, PROMPT, drafter=polydraft.NoDraft(), max_new_tokens=8, temperature=0)
    assert state_of(target) == before
    assert calls == [False] * 5


@pytest.mark.long(1)
@pytest.mark.parametrize(
    "way", [partial(HuggingFaceModel, fused=False), fused, lambda model: CompiledModel(model, backend="eager")]
)
def test_every_way_to_run_a_model(way: Callable[[PreTrainedModel], HuggingFaceModel]) -> None:
    model, plain = lent(), lent().eval()
    before = state_of(model)
    tokens, mask = torch.arange(4).view(1, 4), torch.ones(1, 4, 5, dtype=torch.bool).tril()
    found = []
    for door in (way(model), HuggingFaceModel(plain)):
        cache, start = door.new_cache(1, 8), torch.zeros(1, dtype=torch.int64)
        door.forward(tokens, tokens, mask[:, :, :4], cache, start)
        last = torch.tensor([[4]])
        seen = torch.ones(1, 1, 5, dtype=torch.bool)
        found.append(door.forward(last, last, seen, cache, start + 4, hidden_layers=(1,)).logits)
        found[-1] = found[-1] + door.forward(last, last, seen, cache, start + 4).logits
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)
    assert state_of(model)["modes"] == before["modes"]  # transformers leaves hooks where it was asked for hidden states


@cache
def noted(packed: bool) -> PreTrainedModel:
    """Return a model with everything that we keep with models: joined weights, compiled passes, notes."""
    model = tiny_model(dtype=torch.float32, hidden_size=512, intermediate_size=640, max_position_embeddings=512)
    if packed:
        pack_linear_layers(model)
    fused(model)
    scored(CompiledModel(model, backend="eager"), [5])
    assert {"polydraft_fused", "polydraft_passes", "polydraft_tried"} <= vars(model).keys()
    return model


def through_pickle(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: PreTrainedModel) -> PreTrainedModel:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.long(2)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.wrong_types
def test_what_is_kept_with_a_model_stays_behind(way: Callable[..., PreTrainedModel], packed: bool) -> None:
    model = noted(packed)
    twin = way(model)
    assert not {vars(twin).get(f"{NOTES}{name}") for name in ("fused", "passes")} - {None}
    texts = [
        polydraft.generate(one, PROMPT, drafter=one, max_new_tokens=6, temperature=0).sequences for one in (model, twin)
    ]
    assert torch.equal(*texts)


def test_what_is_kept_with_a_model_is_not_saved(tmp_path: Path) -> None:
    model = noted(True)
    plain = tiny_model(dtype=torch.float32, hidden_size=512, intermediate_size=640, max_position_embeddings=512)
    for one, folder in ((model, "a"), (plain, "b")):
        one.save_pretrained(tmp_path / folder)
    assert list(model.state_dict()) == list(plain.state_dict())
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "llama4_text", "gpt_oss"])
def test_windows_are_tried_on_a_copy(kind: str) -> None:
    """Whatever a pass of another thread would read in the configuration at any time is what is there."""
    model, windows = windowed(kind), []
    model.register_forward_pre_hook(lambda *_: windows.append(settings_of(model.config)))
    before = {name: settings_of(one) for name, one in model.named_modules()}
    door = HuggingFaceModel(model)
    assert len(windows) > 2 and all(one == settings_of(model.config) for one in windows)
    assert {name: settings_of(one) for name, one in model.named_modules()} == before
    assert 12 in settings_of(model.config).values() and 12 in sizes_of(door.windows)


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_first_calls_of_several_threads(kind: str) -> None:
    model, prompts = windowed(kind), [torch.randint(1, 24, (1, 20)) for _ in range(3)]
    options = {"do_sample": False, "max_new_tokens": 12}
    wanted = [model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist() for ids in prompts]
    before, tried = state_of(model), copy.deepcopy(model)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda ids: polydraft.generate(tried, ids, drafter="ngram", **options), prompts))
    assert [one.sequences.tolist() for one in found] == wanted
    assert state_of(tried)["config"] == before["config"]


def test_a_hook_that_cannot_be_copied_costs_no_window() -> None:
    model, lock = windowed("mistral"), Lock()

    class Locked:
        def __init__(self) -> None:
            self.lock = lock

        def __call__(self, *_: object) -> None:
            with self.lock:
                pass

    model.model.register_forward_pre_hook(Locked())
    model.note, model.notes = lock, [lock, {"lock": lock}]
    assert HuggingFaceModel(model).windows == HuggingFaceModel(windowed("mistral")).windows


def test_the_last_of_several_passes_gives_models_their_mode_back() -> None:
    model, other = lent(), lent(seed=1)
    modes = [one.training for one in model.modules()]
    first, second = (evaluating(list(model.modules())) for _ in range(2))
    first.__enter__()
    with evaluating(list(other.modules())):
        second.__enter__()
    assert other.training and not any(one.training for one in model.modules())
    first.__exit__(None, None, None)
    assert not any(one.training for one in model.modules()), "the second pass has not ended"
    second.__exit__(None, None, None)
    assert [one.training for one in model.modules()] == modes
    model.train()
    with evaluating(list(model.modules())):
        model.train()  # somebody else's
        with evaluating(list(model.modules())):
            assert not any(one.training for one in model.modules())
    assert all(one.training for one in model.modules())


def test_threads_share_a_model_in_training() -> None:
    model = lent(attn_pdrop=0.9)
    before, options = state_of(model), {"temperature": 0, "max_new_tokens": 12, "drafter": "ngram"}
    wanted = polydraft.generate(copy.deepcopy(model).eval(), PROMPT, **options).sequences
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: polydraft.generate(model, PROMPT, **options).sequences, range(8)))
    assert all(torch.equal(one, wanted) for one in found)
    assert state_of(model) == before


@pytest.mark.parametrize("layer", [0, 1, 2, "final"])
def test_hidden_states_are_those_of_the_threads_own_pass(layer: Layer) -> None:
    model = tiny_model()
    with observed_layers(model, (layer,), tuple(model.modules())) as found:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, PROMPT.flip(-1)).result()
        assert not found
        model(PROMPT)
        own = found[layer].clone()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, PROMPT.flip(-1)).result()
        assert torch.equal(found[layer], own)
