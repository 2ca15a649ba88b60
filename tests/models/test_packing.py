import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from polydraft.models import anatomy
from polydraft.models.anatomy import PackedLinear, linear_of, pack_linear_layers

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def plain(inputs: int = 300, outputs: int = 400, bias: bool = True) -> nn.Linear:
    stream = torch.Generator().manual_seed(3)
    layer = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=stream)
    return layer


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of the plain kernel."""
    calls: list[int] = []
    real = anatomy.functional.linear

    def linear(*arguments):
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(anatomy.functional, "linear", linear)
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 300), (2, 3, 300), (1, 1, 300)])
def test_it_computes_what_the_plain_layer_does(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch):
    layer, calls = plain(bias=bias), spied(monkeypatch)
    with torch.inference_mode():
        wanted = layer(inputs(*shape))
        calls.clear()
        torch.testing.assert_close(PackedLinear(layer)(inputs(*shape)), wanted, rtol=1e-5, atol=1e-4)
    assert len(calls) == (shape == (1, 1, 300)), "a single row takes the plain kernel"


def test_a_large_matrix_is_packed_for_one_row_too(monkeypatch: pytest.MonkeyPatch):
    layer, calls = PackedLinear(plain(600, 1000)), spied(monkeypatch)
    with torch.no_grad():
        layer(inputs(1, 600))
    assert not calls


def test_what_was_copied_can_be_packed_again(monkeypatch: pytest.MonkeyPatch):
    """A copy leaves its packed weights behind, and may have been given other ones since."""
    model, calls = copy.deepcopy(pack_linear_layers(nn.Sequential(plain(600, 1000)))), spied(monkeypatch)
    with torch.no_grad():
        model[0].weight.mul_(2)
        wanted = model(inputs(3, 600))
        assert calls
        calls.clear()
        torch.testing.assert_close(pack_linear_layers(model)(inputs(3, 600)), wanted, rtol=1e-5, atol=1e-3)
    assert not calls


def test_changed_weights_are_never_served_packed():
    layer = PackedLinear(plain())
    with torch.no_grad():
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(inputs(4, 300)), plain()(inputs(4, 300)) * 2 - plain().bias)


def test_training_precision_and_copies_fall_back():
    layer = PackedLinear(plain())
    loss = layer(inputs(4, 300)).sum()
    loss.backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        wanted = plain()(inputs(4, 300))
        torch.testing.assert_close(copy.deepcopy(layer)(inputs(4, 300)), wanted)
        torch.testing.assert_close(layer.double()(inputs(4, 300).double()).float(), wanted, rtol=1e-5, atol=1e-4)


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


def test_a_model_keeps_its_parameters_and_its_logits():
    packed = model()
    state = {name: tensor.data_ptr() for name, tensor in packed.state_dict().items()}
    ids = torch.arange(12).view(2, 6)
    with torch.inference_mode():
        wanted = packed(ids).logits
        pack_linear_layers(packed)
        torch.testing.assert_close(packed(ids).logits, wanted, rtol=1e-4, atol=1e-5)
    assert {name: tensor.data_ptr() for name, tensor in packed.state_dict().items()} == state
    layers = [one for one in packed.modules() if isinstance(one, nn.Linear)]
    assert all(isinstance(one, PackedLinear) == (one.weight.numel() > anatomy.SMALL) for one in layers)
    assert any(isinstance(one, PackedLinear) for one in layers)


def test_what_would_not_gain_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    double = model().double()
    pack_linear_layers(double)
    monkeypatch.setattr(anatomy, "MOST_BYTES", 1000)
    large = model()
    pack_linear_layers(large)
    assert not [one for whole in (double, large) for one in whole.modules() if isinstance(one, PackedLinear)]


def test_packed_layers_are_in_the_mode_of_those_that_they_replace() -> None:
    """Else every pass would have to put them into evaluation mode, and back."""
    for training in (False, True):
        plain = nn.Sequential(nn.Linear(512, 512)).train(training)
        assert type(pack_linear_layers(plain)[0]) is PackedLinear
        assert all(one.training is training for one in plain.modules())


def test_rows_that_were_taken_in_inference_mode_are_packed_too() -> None:
    table = torch.randn(anatomy.SMALL // 64 + 2, 64)
    with torch.inference_mode():
        rows = linear_of(table[torch.arange(len(table))])
        given = torch.randn(3, 64)
        found = rows(given)
    assert isinstance(rows, PackedLinear)
    torch.testing.assert_close(found, given @ table.mT, rtol=1e-4, atol=1e-4)


def test_a_model_made_in_inference_mode_is_left_as_it_is():
    """Its weights keep no count of their changes, so packed copies could go stale."""
    with torch.inference_mode():
        model = nn.Sequential(plain())
        assert pack_linear_layers(model) is model
        assert type(model[0]) is nn.Linear
