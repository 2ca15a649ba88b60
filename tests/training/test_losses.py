import torch

from polydraft.training import distillation_loss, next_token_loss, overlap_loss


def test_next_token_loss_is_the_mean_surprise_of_the_following_token() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1 / 3, 1 / 3, 1 / 3]]]))
    expected = -(torch.tensor(0.25).log() + torch.tensor(0.8).log()) / 2
    torch.testing.assert_close(next_token_loss(logits, torch.tensor([[0, 1, 2]])), expected)


def test_distillation_loss_is_the_divergence_from_the_target() -> None:
    draft, target = torch.tensor([[[0.7, 0.3]]]), torch.tensor([[[0.5, 0.5]]])
    expected = (target * (target / draft).log()).sum()
    torch.testing.assert_close(distillation_loss(draft.log(), target.log()), expected)
    assert distillation_loss(target.log(), target.log()).abs() < 1e-7


def test_overlap_loss_is_minus_log_of_the_common_mass() -> None:
    draft, target = torch.tensor([[[0.7, 0.3, 0.0]]]), torch.tensor([[[0.5, 0.2, 0.3]]])
    torch.testing.assert_close(overlap_loss(draft.log(), target.log()), -torch.tensor(0.7).log())


def test_both_distances_pull_the_draft_towards_the_target() -> None:
    target = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
    for loss in (distillation_loss, overlap_loss):
        draft = torch.zeros(1, 4, 6, requires_grad=True)
        optimiser = torch.optim.Adam([draft], lr=0.1)
        first = float(loss(draft.detach(), target))
        for _ in range(200):
            optimiser.zero_grad()
            loss(draft, target).backward()
            optimiser.step()
        assert float(loss(draft.detach(), target)) < 0.05 * first
