"""The MLP speculator: its rows by hand, greedy and sampled texts, folders, and its training's rows."""

from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import distance, law_of
from doubles import tiny_model
from heads import Seen, rows_of
from safetensors.torch import load_file, save_file
from test_block_heads import begun, text_of
from torch import Tensor

import polydraft
from polydraft.drafters.heads.drafter import HeadDrafter, HeadEnds
from polydraft.drafters.heads.formats.walked.walk_folders import write_mlp
from polydraft.drafters.heads.walks.speculators import MlpSpeculator
from polydraft.errors import CheckpointError, InvalidParameter, TargetMismatch
from polydraft.models import HuggingFaceModel
from polydraft.schemes import IID
from polydraft.training.heads.losses.last_state_training import WalkTraining
from polydraft.training.heads.losses.row_losses import TargetEnds, soft_cross_entropy
from polydraft.trees import BestFirst, Chain, Frontier, Widths
from polydraft.verifiers import BottomUp, Optimal

VOCAB, ROWS = 24, [[3, 1, 4, 1, 5], [9, 2, 6], [5]]


def speculator(width: int = 16, vocab: int = VOCAB, inner: int = 12, **changes: Any) -> HeadDrafter[MlpSpeculator]:
    torch.manual_seed(4)
    network = MlpSpeculator(width, inner, vocab, 3, **changes).double().eval().requires_grad_(False)
    for weights in network.parameters():
        weights.add_(0.3 * torch.randn(weights.shape, dtype=weights.dtype))
    return HeadDrafter(network, HeadEnds())


def by_hand(network: MlpSpeculator, hidden: Tensor, path: list[int]) -> Tensor:
    """Return the logits behind every token of a path, by the published formulas."""
    kept = 0.5 ** (0.5 / 3)
    scale = sqrt((1 - kept**2) * network.inner / 2) / kept
    state, found = hidden, []
    if network.scaled:
        state = state / torch.sqrt((state**2).mean() + 1e-6) / sqrt(2)
    for depth, token in enumerate(path):
        names = dict(network.stages[min(depth, 2)].named_parameters())
        state = names["proj.weight"] @ state + scale * names["emb.weight"][token]
        state = names["ln.norm.weight"] * state / torch.sqrt((state**2).mean() + 1e-6) + names["ln.shift"]
        state = 0.5 * state * (1 + torch.erf(state / sqrt(2)))
        found.append(names["lm_head.weight"] @ state)
    return torch.stack(found)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_rows_of_a_path_are_those_of_the_formulas(scaled: bool) -> None:
    target, text, drafter = HuggingFaceModel(tiny_model(vocab=VOCAB)), text_of(ROWS), speculator(scaled=scaled)
    state, features = begun(target, drafter, text)
    assert features is not None
    grown, _ = drafter.network.root(state.memory, text, state.ends)
    paths = [[row[-1], 7, 0, 11, 2] for row in ROWS]
    for depth in range(5):
        tokens = torch.tensor([path[depth] for path in paths]).unsqueeze(-1)
        frontier = Frontier(range(depth, depth + 1), tokens, depth, torch.ones(3, 1, depth + 1, dtype=torch.bool))
        rows = rows_of(grown, state, frontier)
        for row, path in enumerate(paths):
            before = (features.places[row] == len(ROWS[row]) - 2).nonzero()
            hidden = features.states["final"][row, int(before[0])] if len(ROWS[row]) > 1 else torch.zeros(16)
            wanted = by_hand(drafter.network, hidden.double(), path[: depth + 1])[-1].softmax(-1)
            torch.testing.assert_close(rows[row, 0].double(), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.long(2)
@pytest.mark.parametrize("policy", [Chain(3), Chain(5), Widths((3, 2, 1)), BestFirst(9)], ids=repr)
def test_greedy_text_is_plain_text_and_every_row_is_what_it_is_alone(policy: Any) -> None:
    target, drafter = tiny_model(vocab=VOCAB), speculator()
    padded, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    for row, tokens in enumerate(ROWS):
        padded[row, 5 - len(tokens) :], mask[row, 5 - len(tokens) :] = torch.tensor(tokens), 1
    given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24}
    wanted = polydraft.generate(target, padded, drafter="none", temperature=0.0, **given)
    found = polydraft.generate(target, padded, drafter=drafter, policy=policy, temperature=0.0, **given)
    assert torch.equal(found.sequences, wanted.sequences) and found.statistics.drafted > 20
    heat: dict[str, Any] = {"drafter": drafter, "policy": policy, "temperature": 1.0, "seed": 3}
    together = polydraft.generate(target, padded, **heat, **given).sequences
    alone = polydraft.generate(target, ROWS[0], max_new_tokens=24, **heat).sequences
    assert together[0].tolist() == alone[0].tolist()


@pytest.mark.slow
def test_the_law_of_texts_is_the_targets() -> None:
    target, drafter = Seen(2), speculator(width=4, vocab=2, inner=3)
    law, failures = law_of(
        target, drafter, BottomUp(Optimal(IID())), Widths((2, 1)), [[1, 0, 1], [0, 1, 1]], 2, steps=1
    )
    assert distance(law, target.texts([1, 0, 1], 2)) < 1e-12 and not failures


def test_a_folder_is_read_again_and_tied_stages_may_stand_once(tmp_path: Path) -> None:
    target, drafter = HuggingFaceModel(tiny_model(vocab=VOCAB)), speculator(scaled=True)
    write_mlp(drafter, tmp_path / "own", target, card="A card.")
    found: Any = polydraft.load_head(str(tmp_path / "own"))
    assert isinstance(found.network, MlpSpeculator) and found.network.scaled and found.name == "mlp speculator"
    for name, value in drafter.network.state_dict().items():
        torch.testing.assert_close(found.network.state_dict()[name].double(), value, rtol=1e-2, atol=1e-2)
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".1." not in name and ".2." not in name}
    kept["speculator.proj.1.weight"] = tensors["speculator.proj.1.weight"]
    config = (tmp_path / "own" / "config.json").read_text().replace('"tie_weights": false', '"tie_weights": true')
    (tmp_path / "tied").mkdir()
    (tmp_path / "tied" / "config.json").write_text(config)
    save_file(kept, tmp_path / "tied" / "model.safetensors")
    tied: Any = polydraft.load_head(str(tmp_path / "tied"))
    assert torch.equal(tied.network.stage(2).lm_head.weight, tied.network.stage(0).lm_head.weight)
    assert torch.equal(tied.network.stage(2).proj.weight, tied.network.stage(1).proj.weight)
    (tmp_path / "own" / "config.json").write_text(config.replace("true", "false"))
    del tensors["speculator.ln.2.bias"]
    save_file(tensors, tmp_path / "own" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"ln\.2\.bias is missing"):
        polydraft.load_head(str(tmp_path / "own"))


def test_a_speculator_for_another_target_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="at least one stage"):
        MlpSpeculator(16, 12, VOCAB, 0)
    for other in (speculator(width=20), speculator(vocab=VOCAB + 9)):
        with pytest.raises(TargetMismatch):
            polydraft.generate(tiny_model(vocab=VOCAB), [1, 2, 3], drafter=other, max_new_tokens=4)


def test_what_is_learnt_is_what_is_drafted() -> None:
    model, drafter = tiny_model(vocab=VOCAB), speculator()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    final, lse = out.hidden_states[-1].float(), out.logits.logsumexp(-1).float()
    training = WalkTraining(drafter.network.float(), TargetEnds.of(model), soft_cross_entropy)
    valid = torch.ones_like(ids)
    found = training(ids, valid, final, final, lse)
    assert found["count"].tolist() == [12, 10, 8]
    drafter.network.double()
    overlaps = []
    for depth in range(3):
        both = []
        for row in range(2):
            for place in range(8 - depth - 2):
                path = ids[row, place + 1 : place + 2 + depth].tolist()
                mine = by_hand(drafter.network, final[row, place].double(), path)[-1].softmax(-1)
                both.append(torch.minimum(mine, out.logits[row, place + 1 + depth].double().softmax(-1)).sum())
        overlaps.append(float(torch.stack(both).mean()))
    assert found["overlap"].tolist() == pytest.approx(overlaps, abs=1e-4)


DAMAGED = {
    "more stages than its tensors hold": ('"n_predict": 3', '"n_predict": 12', "n_predict"),
    "more stages than any has": ('"n_predict": 3', '"n_predict": 1000000000', "at most 16"),
    "a word for a flag": ('"tie_weights": false', '"tie_weights": "no"', "must be true or false"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_folder_that_asks_for_more_than_it_holds_is_refused(case: str, tmp_path: Path) -> None:
    before, after, said = DAMAGED[case]
    write_mlp(speculator(), tmp_path, HuggingFaceModel(tiny_model(vocab=VOCAB)))
    config = (tmp_path / "config.json").read_text()
    assert before in config
    (tmp_path / "config.json").write_text(config.replace(before, after))
    with pytest.raises(CheckpointError, match=said):
        polydraft.load_head(str(tmp_path))


def test_a_folder_of_empty_tables_is_refused(tmp_path: Path) -> None:
    write_mlp(speculator(), tmp_path, HuggingFaceModel(tiny_model(vocab=VOCAB)))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["speculator.emb.0.weight"] = torch.zeros(VOCAB, 0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is empty"):
        polydraft.load_head(str(tmp_path))
