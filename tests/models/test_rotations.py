"""Rotations whose frequencies follow from the longest position of a pass: text ends where drafts would change them."""

from typing import Any

import pytest
import torch
from families import built
from transformers import Gemma3Config, PreTrainedModel

import polydraft
from polydraft.models import HuggingFaceModel
from polydraft.models.checks.layout import context_of

SWITCH, HALF = 32, 4
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": SWITCH,
    "factor": 4.0,
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + 8 * place for place in range(HALF)],
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 256}

pytestmark = pytest.mark.filterwarnings("ignore:A text was cut short")


def nested(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {**MIXED, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


SWITCHING: dict[str, tuple[str, dict[str, Any], int]] = {
    "flat": ("llama", {"rope_parameters": LONG}, SWITCH),
    "old words": ("llama", {"rope_scaling": {**LONG, "type": "longrope"}}, SWITCH),
    "beside the set": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": SWITCH}, SWITCH),
    "one kind": ("gemma3_text", nested(LONG, PLAIN), SWITCH),
    "the other kind": ("gemma3_text", nested(PLAIN, LONG), SWITCH),
    "two originals": ("gemma3_text", nested(LONG, {**LONG, "original_max_position_embeddings": 24}), 24),
    "another model": ("modernbert-decoder", nested(LONG, PLAIN), SWITCH),
}
GROWING: dict[str, tuple[str, dict[str, Any]]] = {
    "flat": ("llama", {"rope_parameters": DYNAMIC}),
    "one kind": ("gemma3_text", nested(DYNAMIC, PLAIN)),
    "both kinds": ("gemma3_text", nested(LONG, DYNAMIC)),
}


def texts(model: PreTrainedModel, start: int, new: int) -> tuple[list[int], Any]:
    """Return Hugging Face's own greedy text, and ours with deep drafts."""
    ids = torch.randint(1, 64, (1, start), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    return wanted, polydraft.generate(model, ids, drafter=model, policy=8, **settings)


@pytest.mark.parametrize("name", SWITCHING)
def test_text_is_hugging_faces_up_to_the_switch(name: str) -> None:
    kind, settings, end = SWITCHING[name]
    model = built(kind, settings)
    wanted, found = texts(model, end - 6, 12)
    assert HuggingFaceModel(model).context == end
    assert found.sequences[0].tolist() == wanted[:end] and found.finish == ("context",)


@pytest.mark.parametrize("name", GROWING)
def test_frequencies_that_grow_do_so_beyond_thecontext_of(name: str) -> None:
    """Also behind a longer text of Hugging Face's, which has left grown frequencies."""
    kind, settings = GROWING[name]
    model = built(kind, {**settings, "max_position_embeddings": SWITCH})
    wanted, found = texts(model, SWITCH - 6, 12)
    assert len(wanted) == SWITCH + 6 and HuggingFaceModel(model).context == SWITCH
    assert found.sequences[0].tolist() == wanted[:SWITCH] and found.finish == ("context",)


def test_the_text_part_of_a_configuration_is_read() -> None:
    text = {"rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN}, "max_position_embeddings": 128}
    config = Gemma3Config(text_config={**MIXED, **text, "num_hidden_layers": 4})
    assert context_of(config.get_text_config(decoder=True)) == SWITCH
