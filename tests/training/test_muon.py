import pytest
import torch
from torch import nn

from polydraft.training.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)])
def test_orthogonalised_moves_singular_values_to_about_one_and_keeps_their_directions(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = orthogonalised(matrices)
    values = torch.linalg.svdvals(result)
    assert 0.6 < float(values.min()) and float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    turned = left.mT @ result @ right.mT
    off_diagonal = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    assert float(off_diagonal.abs().max()) < 1e-6


def test_embeddings_and_vectors_are_updated_as_by_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    twin = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    twin.load_state_dict(model.state_dict())
    ours = Muon(model, matrix_rate=0.0, other_rate=0.01)
    others = [one for name, one in twin.named_parameters() if name != "2.weight"]
    theirs = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        for module, optimiser in ((model, ours), (twin, theirs)):
            optimiser.zero_grad()
            module(torch.tensor([0, step, 3])).square().sum().backward()
            optimiser.step()
    for mine, yours in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, yours)


def test_output_rows_are_updated_as_by_adamw() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.Linear(4, 4, bias=False), "lm_head": nn.Linear(4, 9, bias=False)})
    matrices, others = (group["params"] for group in Muon(model, 0.1, 0.1).param_groups)
    assert [one.shape for one in matrices] == [(4, 4)] and [one.shape for one in others] == [(9, 4)]


def test_matrices_learn() -> None:
    torch.manual_seed(0)
    model, wanted, inputs = nn.Linear(6, 6, bias=False), torch.randn(6, 6), torch.randn(64, 6)
    optimiser = Muon(model, matrix_rate=0.05, other_rate=0.0, weight_decay=0.0)
    losses = []
    for step in range(300):
        optimiser.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
        optimiser.zero_grad()
        loss = (model(inputs) - inputs @ wanted.T).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1e-3 * losses[0]
