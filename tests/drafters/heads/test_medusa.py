"""Medusa's heads: their rows by the formula, their folders, and texts that are the target's, whatever drafts them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import plain_logits, tiny_model
from heads import of_medusa
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import polydraft
from polydraft.conformance import check
from polydraft.drafters import DraftRequest, Session, load_head
from polydraft.drafters.heads.drafter import HeadDrafter
from polydraft.drafters.heads.formats.last_state_folders import is_medusa, read_medusa, write_medusa
from polydraft.drafters.heads.last_state_heads import MedusaHead, MedusaHeads
from polydraft.errors import CheckpointError, InvalidParameter, TargetMismatch, UnpairedScheme
from polydraft.models import HuggingFaceModel, read_plain, write_plain
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Features, Reader, Step, Text
from polydraft.rows import cut, put
from polydraft.schemes import IID, ConditionalPoisson, Coupled, Given, Product, Scheme, TopK, WithoutReplacement
from polydraft.trees import MEDUSA_63, BestFirst, Chain, Draft, Fixed, TreePolicy, Widths
from polydraft.verifiers import BlockVerification, RecursiveRejection, TopDown

VOCAB, WIDTH = 24, 16
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [4]]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@cache
def target(vocab: int = VOCAB) -> PreTrainedModel:
    return tiny_model("llama", vocab)


def heads(
    count: int = 3,
    layers: int = 1,
    rows: str = "own",
    tokens: Tensor | None = None,
    *,
    bias: bool = True,
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float64,
) -> MedusaHeads:
    """Return heads near the target's own, so that some drafts are right; `rows` are own, shared or the target's."""
    stream = torch.Generator().manual_seed(3)
    table = target(vocab).get_output_embeddings().weight.detach()
    table = table if tokens is None else table[tokens]

    def linear() -> nn.Linear:
        own = nn.Linear(WIDTH, len(table), bias=False).to(dtype)
        own.weight.data = (table + 0.1 * torch.randn(table.shape, generator=stream)).to(dtype)
        return own

    common = linear()
    made = []
    for _ in range(count):
        own = {"own": linear(), "shared": common, "target": None}[rows]
        head = MedusaHead(WIDTH, layers, own, bias=bias).to(dtype)
        for weights in head.blocks.parameters():
            weights.data = (0.3 * torch.randn(weights.shape, generator=stream)).to(dtype)
        made.append(head)
    return MedusaHeads(made, WIDTH, tokens, vocab).requires_grad_(False)


def reference(own: MedusaHeads, place: int, hidden: Tensor, vocab: int = VOCAB) -> Tensor:
    """Return the logits of one head, by the formula."""
    head = own.head(place)
    for linear in head.linears:
        turned = linear.weight @ hidden + (0 if linear.bias is None else linear.bias)
        hidden = hidden + turned / (1 + torch.exp(-turned))
    table = target(vocab).get_output_embeddings().weight.detach() if head.lm_head is None else head.lm_head.weight
    if own.tokens is not None and head.lm_head is None:
        table = table[own.tokens]
    return table @ hidden


def final(tokens: Sequence[int], vocab: int = VOCAB) -> Tensor:
    """Return the target's hidden states behind the last norm."""
    with torch.no_grad():
        return target(vocab)(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1][0]


def greedy(prompt: Sequence[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + length:
        text.append(int(plain_logits(target(), text).argmax()))
    return text[len(prompt) :]


def text_of(rows: Sequence[Sequence[int]]) -> Text:
    tokens = torch.zeros(len(rows), 64, dtype=torch.int64)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    return Text(tokens, torch.tensor([len(row) for row in rows]))


def session(rows: int = 1, heat: float = 1.0) -> Session:
    door = HuggingFaceModel(target())
    return Session(SamplingParams(temperature=heat), 128, VOCAB, Reader.new(door, rows, 128, ("final",)))


def begun(drafter: HeadDrafter[Any], rows: Sequence[Sequence[int]], heat: float = 1.0) -> tuple[Any, Text, Reader]:
    """Return a drafter's state that has read these rows, and the target's reader."""
    told, text = session(len(rows), heat), text_of(rows)
    assert told.target is not None
    reader, features = told.target.catch_up(text)
    return drafter.read(drafter.start(text, told), text, features), text, reader


# Rows.


@pytest.mark.parametrize("rows", ["own", "shared", "target"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("tokens", [None, torch.tensor([1, 2, 5, 7, 11, 13, 17, 23])], ids=["all", "fewer"])
def test_rows_are_those_of_the_formula(rows: str, layers: int, tokens: Tensor | None) -> None:
    own = heads(2, layers, rows, tokens, bias=layers == 1)
    drafter = of_medusa(own, shortlist_size=8, params=SamplingParams())
    state, text, _ = begun(drafter, PROMPTS)
    draft, _ = drafter.draft(state, DraftRequest(text, WithoutReplacement(), Widths((3, 2, 1)), Noise.from_seed(0, 3)))
    for row, prompt in enumerate(PROMPTS):
        hidden = final(prompt)[len(prompt) - 2] if len(prompt) > 1 else torch.zeros(WIDTH, dtype=torch.float64)
        for node in (draft.tree.children[row, :, 0] >= 0).nonzero().flatten().tolist():
            depth = int(draft.tree.depth[row, node])
            logits = reference(own, min(depth, 1), hidden)
            probs, places = logits.topk(8)
            named = places if tokens is None else tokens[places]
            assert draft.shortlist[row, node].tolist() == named.tolist()
            torch.testing.assert_close(draft.probs[row, node], probs.softmax(-1))


def test_new_heads_with_the_targets_rows_predict_what_the_target_does() -> None:
    own = MedusaHeads([MedusaHead(WIDTH).double() for _ in range(2)], WIDTH)
    state, text, _ = begun(of_medusa(own), [PROMPTS[0]], 0.0)
    draft, _ = of_medusa(own).draft(state, DraftRequest(text, TopK(), Chain(3), Noise.from_seed(0, 1)))
    assert draft.tree.tokens[0, 1:].tolist() == [int(plain_logits(target(), PROMPTS[0][:-1]).argmax())] * 3


def test_heads_of_another_precision_draft_too() -> None:
    for rows in ("own", "target"):
        drafter = of_medusa(heads(rows=rows, dtype=torch.float32))
        for prompts in (PROMPTS, [[4]]):
            state, text, _ = begun(drafter, prompts)
            draft, _ = drafter.draft(state, DraftRequest(text, IID(), Chain(4), Noise.from_seed(0, len(prompts))))
            assert draft.tree.tokens.shape == (len(prompts), 5)


# Texts.


POLICIES = (Chain(5), Widths((3, 2, 1)), BestFirst(12), Fixed(MEDUSA_63))


@pytest.mark.long(4)
@pytest.mark.parametrize("policy", POLICIES, ids=["chain", "widths", "best-first", "medusa"])
@pytest.mark.parametrize("rows", ["own", "target"])
def test_greedy_texts_are_plain_ones(policy: TreePolicy, rows: str) -> None:
    drafter, width = of_medusa(heads(rows=rows)), max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS])
    found = polydraft.generate(
        target(), ids, attention_mask=mask, drafter=drafter, policy=policy, max_new_tokens=16, **GREEDY
    )
    assert [text[width:].tolist() for text in found.sequences] == [greedy(prompt, 16) for prompt in PROMPTS]
    assert not found.statistics.fallback and found.statistics.accepted > 0
    many = polydraft.generate_many(
        target(), [*PROMPTS, PROMPTS[0][:7]], drafter=drafter, policy=policy, batch_size=2, max_new_tokens=16, **GREEDY
    )
    texts = {one.name: one.tokens for one in many}
    assert [texts[name] for name in range(4)] == [greedy(prompt, 16) for prompt in [*PROMPTS, PROMPTS[0][:7]]]


def test_defaults_generate_at_any_temperature() -> None:
    drafter = of_medusa(heads())
    ids = torch.tensor([PROMPTS[0]])
    found = polydraft.generate(target(), ids, drafter=drafter, max_new_tokens=12, **GREEDY)
    assert found.sequences[0, 11:].tolist() == greedy(PROMPTS[0], 12)
    assert drafter.defaults(SamplingParams()).policy == Chain(3)
    found = polydraft.generate(
        target(), ids, drafter=drafter, max_new_tokens=12, temperature=1.0, seed=1, eos_token_id=None
    )
    assert found.sequences.shape == (1, 23) and not found.statistics.fallback


@pytest.mark.long(2)
@pytest.mark.parametrize("tokens", [None, torch.tensor([0, 2, 3])], ids=["all tokens", "three of five"])
@pytest.mark.parametrize(
    ("rule", "policy"),
    [(BlockVerification(), Chain(3)), (TopDown(RecursiveRejection()), Widths((2, 1, 1)))],
    ids=["chain", "tree"],
)
def test_sampled_text_has_the_models_law(rule: Any, policy: TreePolicy, tokens: Tensor | None) -> None:
    """Sampled texts are consistent with the enumerated law; a right engine fails with probability 1e-6."""
    model, drafter = target(5), of_medusa(heads(2, tokens=tokens, vocab=5))

    def generate(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        found = polydraft.generate(
            model,
            torch.tensor(prompts),
            drafter=drafter,
            verifier=rule,
            policy=policy,
            max_new_tokens=3,
            temperature=1.0,
            eos_token_id=None,
            seed=seeds[0],
        )
        assert not found.statistics.fallback
        return found.sequences[:, len(prompts[0]) :].tolist()

    report = check(generate, model, [[1, 2, 3]], batch_size=64, most_samples=640, params=SamplingParams())
    assert report.passed, str(report)


# States.


def same_drafts(one: Draft, other: Draft) -> None:
    assert torch.equal(one.tree.tokens, other.tree.tokens) and torch.equal(one.tree.valid, other.tree.valid)
    torch.testing.assert_close(one.probs, other.probs)


def stepped(
    drafter: HeadDrafter[Any], state: Any, reader: Reader, rows: list[list[int]], number: int
) -> tuple[Any, ...]:
    """Take a step by the verifier, and return state, reader and rows after it."""
    text, rule = text_of(rows), BlockVerification()
    draft, state = drafter.draft(state, DraftRequest(text, IID(), Chain(3), Noise.from_seed(number, len(rows))))
    scored, reader = reader.score(text, draft.tree)
    probs = scored.logits.softmax(-1)
    verdict = rule.verify(draft, probs, Noise.from_seed(50 + number, len(rows)))
    state = drafter.commit(state, Step(text, draft.tree, scored, probs, verdict))
    kept = [path[path >= 0].tolist() for path in verdict.path]
    following = verdict.next_token.tolist()
    rows = [[*own, *draft.tree.tokens[row, kept[row]].tolist(), following[row]] for row, own in enumerate(rows)]
    return state, reader.keep(text, verdict), rows, sum(map(len, kept))


def test_every_step_drafts_as_a_fresh_start_on_its_text_does() -> None:
    drafter, rows, accepted = of_medusa(heads(rows="target")), [list(row) for row in PROMPTS], 0
    state, _, reader = begun(drafter, rows)
    for number in range(6):
        state, reader, rows, kept = stepped(drafter, state, reader, rows, number)
        accepted += kept
        fresh, text, _ = begun(drafter, rows)
        drawn = [
            drafter.draft(one, DraftRequest(text, IID(), Widths((2, 2)), Noise.from_seed(9, 3)))[0]
            for one in (state, fresh)
        ]
        same_drafts(*drawn)
    assert accepted > 0


def test_prompts_may_come_in_chunks_and_features_may_be_padded() -> None:
    drafter, told, text = of_medusa(heads()), session(3), text_of(PROMPTS)
    state, reader = drafter.start(text, told), told.target
    for _ in range(4):
        reader, features = reader.catch_up(text, 3)
        state = drafter.read(state, text, features)
    whole, _, _ = begun(drafter, PROMPTS)
    assert state.memory.place.tolist() == whole.memory.place.tolist() == [9, 1, -1]
    nothing = Features(torch.full((3, 2), -1), {"final": torch.full((3, 2, WIDTH), torch.nan, dtype=torch.float64)})
    state = drafter.read(state, text, nothing)
    same_drafts(
        *(drafter.draft(one, DraftRequest(text, IID(), Chain(3), Noise.from_seed(1, 3)))[0] for one in (state, whole))
    )


@pytest.mark.parametrize("place", [1, 3], ids=["in a row's place", "behind the last"])
@pytest.mark.parametrize("newcomer", [[9, 9, 8], [6]], ids=["some tokens", "one token"])
def test_a_joined_row_drafts_as_alone_and_leaves_the_others_alone(place: int, newcomer: list[int]) -> None:
    drafter = of_medusa(heads())
    state, _, _ = begun(drafter, PROMPTS)
    other, alone, _ = begun(drafter, [newcomer])
    before = state.memory.hidden.clone()
    joined = put(state, place, other)
    rows = [*PROMPTS[:place], newcomer, *PROMPTS[place + 1 :]]
    noise = Noise.from_seed(1, len(rows))
    draft, _ = drafter.draft(joined, DraftRequest(text_of(rows), TopK(), Widths((2, 2)), noise))
    single, _ = drafter.draft(other, DraftRequest(alone, TopK(), Widths((2, 2)), Noise.from_seed(1, 1)))
    assert draft.tree.tokens[place].tolist() == single.tree.tokens[0].tolist()
    plain, _ = drafter.draft(state, DraftRequest(text_of(PROMPTS), TopK(), Widths((2, 2)), Noise.from_seed(1, 3)))
    kept = [row for row in range(3) if row != place]
    assert torch.equal(draft.tree.tokens[kept], plain.tree.tokens[kept])
    assert torch.equal(state.memory.hidden, before)


def test_a_row_that_is_rewound_is_not_known_until_it_is_read_again() -> None:
    drafter = of_medusa(heads())
    state, text, _ = begun(drafter, PROMPTS)
    assert cut(state, 0, 10).memory.place.tolist() == [9, 1, -1]
    back = cut(state, 0, 5)
    assert back.memory.place.tolist() == [-1, 1, -1] and state.memory.place.tolist() == [9, 1, -1]
    assert cut(state, 1, 0).memory.place.tolist() == [9, -1, -1]
    shorter = text_of([PROMPTS[0][:5], *PROMPTS[1:]])
    draft, _ = drafter.draft(back, DraftRequest(shorter, IID(), Chain(3), Noise.from_seed(1, 3)))
    zeros = torch.zeros(WIDTH, dtype=torch.float64)
    torch.testing.assert_close(
        draft.probs[0, 1].sort().values, reference(drafter.network, 1, zeros).softmax(-1).sort()[0]
    )
    states = final(PROMPTS[0])[3].expand(3, 1, -1)
    again = drafter.read(back, shorter, Features(torch.tensor([[3], [-1], [-1]]), {"final": states}))
    draft, _ = drafter.draft(again, DraftRequest(shorter, TopK(), Chain(1), Noise.from_seed(1, 3)))
    assert int(draft.tree.tokens[0, 1]) == int(reference(drafter.network, 0, states[0, 0]).argmax())
    other, _, _ = begun(of_medusa(heads()), PROMPTS)
    assert state.resumes(back) and not state.resumes(other)
    assert text.counts == (11, 3, 1)


def test_a_conversation_goes_on_from_its_past() -> None:
    drafter = of_medusa(heads())
    options: dict[str, Any] = {"drafter": drafter, "policy": Chain(3), "max_new_tokens": 11, **GREEDY}
    run = polydraft.stream(target(), torch.tensor([PROMPTS[0]]), keep_past=True, **options)
    for _ in run:
        pass
    for prompt in ([*PROMPTS[0], *run.new_tokens[0], 3, 4, 5], [*PROMPTS[0][:8], 7]):
        after = polydraft.generate(target(), torch.tensor([prompt]), past=run.past, **options)
        assert after.sequences[0, len(prompt) :].tolist() == greedy(prompt, 11)
        assert not after.statistics.fallback


@pytest.mark.parametrize("scheme", [ConditionalPoisson(), Coupled(), Product(), TopK()], ids=lambda one: one.name)
def test_a_step_may_be_taken_again(scheme: Scheme) -> None:
    drafter = of_medusa(heads())
    state, text, _ = begun(drafter, PROMPTS)
    before = (state.memory.hidden.clone(), state.memory.place.clone())
    drafts = [
        drafter.draft(state, DraftRequest(text, scheme, Widths((2, 1)), Noise.from_seed(4, 3)))[0] for _ in range(2)
    ]
    same_drafts(*drafts)
    assert torch.equal(state.memory.hidden, before[0]) and torch.equal(state.memory.place, before[1])


# Refusals.


def test_another_target_is_refused_before_anything_is_generated() -> None:
    ids, options = torch.tensor([PROMPTS[1]]), {"policy": Chain(2), "max_new_tokens": 3, **GREEDY}
    wide = Reader.new(HuggingFaceModel(tiny_model("llama", VOCAB, hidden_size=32)), 1, 9, ("final",))
    with pytest.raises(TargetMismatch, match="states 16 wide and the target's are 32: it was trained for another"):
        of_medusa(heads()).start(text_of([[1]]), Session(SamplingParams(), 9, VOCAB, wide))
    with pytest.raises(TargetMismatch, match="a target of 30 tokens and this one has 24: it is another target"):
        polydraft.generate(target(), ids, drafter=of_medusa(heads(vocab=30)), **options)
    few = MedusaHeads([MedusaHead(WIDTH).double()], WIDTH, vocab_size=5000)
    with pytest.raises(TargetMismatch, match="a target of 5000 tokens and this one has 24: it is another target"):
        polydraft.generate(target(), ids, drafter=of_medusa(few), **options)
    with pytest.raises(UnpairedScheme, match="A Medusa head works with drafts that are"):
        of_medusa(heads()).check(Given())
    with pytest.raises(InvalidParameter, match="shortlist_size must be at least 1"):
        of_medusa(heads(), shortlist_size=0)
    with pytest.raises(InvalidParameter, match="these have no head"):
        MedusaHeads([], WIDTH)
    with pytest.raises(InvalidParameter, match="Heads of 2 tokens have 24 output rows"):
        MedusaHeads([*heads(1)], WIDTH, torch.tensor([1, 2]))


# Folders.


CONFIG = {"base_model_name_or_path": "some/model", "medusa_num_heads": 2, "medusa_num_layers": 1}


def layout_a(own: MedusaHeads) -> dict[str, Tensor]:
    found = {}
    for place, head in enumerate(own):
        for layer, linear in enumerate(head.linears):
            found[f"{place}.{layer}.linear.weight"] = linear.weight
            found[f"{place}.{layer}.linear.bias"] = linear.bias
        if head.lm_head is not None:
            found[f"{place}.{len(head.linears)}.weight"] = head.lm_head.weight
    return {name: value.detach().clone() for name, value in found.items()}


def layout_c(own: MedusaHeads, prefix: str = "") -> dict[str, Tensor]:
    found = {}
    for place, head in enumerate(own):
        for layer, linear in enumerate(head.linears):
            for name, value in linear.named_parameters():
                found[f"{prefix}blocks.{place}.layers.{layer}.{name}"] = value
        if head.lm_head is not None:
            found[f"{prefix}lm_heads.{place}.weight"] = head.lm_head.weight
    return {name: value.detach().clone() for name, value in found.items()}


def config_c(own: MedusaHeads, **changes: Any) -> dict[str, Any]:
    sizes = {"num_heads": len(own), "num_hidden_layers": len(own.head(0).linears), "hidden_size": WIDTH}
    sizes |= {"vocab_size": VOCAB, "truncated_vocab_size": VOCAB}
    return {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes, **changes}


def loaded(folder: Path) -> MedusaHeads:
    found = read_plain(folder)
    assert is_medusa(found.config)
    return read_medusa(found).network


def same_heads(one: MedusaHeads, other: MedusaHeads) -> None:
    """Check that both have the same rows everywhere."""
    assert (len(one), one.rows) == (len(other), other.rows)
    states = torch.randn(7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(one, other, strict=True):
        rows = [head.double().logits(states, lambda found: found) for head in (ours, theirs)]
        torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-5)
    assert (one.tokens is None) == (other.tokens is None)
    if one.tokens is not None:
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("rows", ["own", "target"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_authors_folders(tmp_path: Path, file: str, rows: str, layers: int) -> None:
    own = heads(5, layers, rows, dtype=torch.float32)
    write_plain(tmp_path, CONFIG, layout_a(own), file="medusa_lm_head.safetensors")
    if file.endswith(".pt"):
        torch.save(layout_a(own), tmp_path / file)
        (tmp_path / "medusa_lm_head.safetensors").unlink()
    same_heads(loaded(tmp_path), own)


@pytest.mark.parametrize("rows", ["own", "target"])
def test_heads_inside_a_full_model(tmp_path: Path, rows: str) -> None:
    own = heads(3, 1, rows, dtype=torch.float32)
    target().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    inside = {f"medusa_head.{name}": value for name, value in layout_a(own).items()}
    save_file({**weights, **inside}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = replace(read_plain(tmp_path), config={**read_plain(tmp_path).config, **CONFIG})
    assert is_medusa(found.config)
    same_heads(read_medusa(found).network, own)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [True, False])
def test_vllms_folders(tmp_path: Path, prefix: str, bias: bool) -> None:
    own = heads(3, 2, bias=bias, dtype=torch.float32)
    for place, flags in enumerate(({}, {"medusa_fc_bias": bias})):
        write_plain(tmp_path / str(place), config_c(own, **flags), layout_c(own, prefix))
        same_heads(loaded(tmp_path / str(place)), own)
    write_plain(tmp_path / "more", config_c(own, num_heads=2), layout_c(own))
    assert len(loaded(tmp_path / "more")) == 3


def test_vllms_folders_with_shared_rows(tmp_path: Path) -> None:
    own = heads(3, rows="shared", dtype=torch.float32)
    tensors = {
        name: value for name, value in layout_c(own).items() if not name.startswith(("lm_heads.1", "lm_heads.2"))
    }
    write_plain(tmp_path / "c", config_c(own, original_lm_head=True), tensors)
    found = loaded(tmp_path / "c")
    same_heads(found, own)
    assert found.head(0).lm_head is found.head(2).lm_head
    write_plain(tmp_path / "d", config_c(own, original_lm_head=True, logit_scale=0.5), tensors)
    torch.testing.assert_close(loaded(tmp_path / "d").head(1).lm_head.weight.double(), own.head(0).lm_head.weight / 2)
    tensors = {name: value for name, value in tensors.items() if "lm_head" not in name}
    write_plain(tmp_path / "e", config_c(own, original_lm_head=True), tensors)
    assert loaded(tmp_path / "e").rows is None


@pytest.mark.parametrize("whole", [False, True], ids=["cut rows", "whole rows"])
def test_vllms_folders_with_fewer_tokens(tmp_path: Path, whole: bool) -> None:
    tokens = torch.tensor([1, 4, 9, 16, 20])
    cut, full = heads(2, tokens=tokens, dtype=torch.float32), heads(2, dtype=torch.float32)
    mixed = torch.tensor([3, 0, 4, 1, 2])  # a token map need not rise
    tensors = layout_c(full if whole else cut)
    for name in tensors:
        tensors[name] = tensors[name][mixed] if name.startswith("lm_heads") and not whole else tensors[name]
    tensors["token_map"] = tokens[mixed]
    write_plain(tmp_path, config_c(cut, truncated_vocab_size=5), tensors)
    found = loaded(tmp_path)
    assert found.tokens.tolist() == tokens.tolist() and found.rows == 5
    for place in range(2):
        wanted = full.head(place).lm_head.weight[tokens] if whole else cut.head(place).lm_head.weight
        assert torch.equal(found.head(place).lm_head.weight, wanted)
    untold = {**layout_c(cut)}
    write_plain(tmp_path / "first", config_c(cut, truncated_vocab_size=5), untold)
    assert (loaded(tmp_path / "first").tokens, loaded(tmp_path / "first").rows) == (None, 5)


@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("rows", ["own", "shared", "target"])
def test_what_is_written_is_read_again(tmp_path: Path, vllm: bool, rows: str) -> None:
    own, door = heads(3, 2, rows, dtype=torch.float32), HuggingFaceModel(target())
    write_medusa(of_medusa(own), tmp_path, door, vllm=vllm, dtype=torch.float32, made_for="some/model", card="Hi.")
    found = loaded(tmp_path)
    assert (tmp_path / "README.md").read_text() == "Hi."
    if vllm and rows == "target":
        same_table = found.head(0).lm_head.weight.double()
        torch.testing.assert_close(same_table, target().get_output_embeddings().weight.detach(), rtol=1e-6, atol=1e-6)
        assert read_plain(tmp_path).config["original_lm_head"] is True
    else:
        same_heads(found, own)
    tokens = torch.tensor([2, 3, 5, 7])
    cut = heads(2, rows=rows, tokens=tokens, dtype=torch.float32)
    if not vllm:
        with pytest.raises(InvalidParameter, match="Medusa's own layout has no heads of fewer tokens; write vLLM's"):
            write_medusa(of_medusa(cut), tmp_path, door)
        return
    write_medusa(of_medusa(cut), tmp_path / "cut", door, vllm=True, dtype=torch.float32)
    assert loaded(tmp_path / "cut").tokens.tolist() == tokens.tolist()


class Malice:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("was-run"),))


NAN, FLAT = torch.full((WIDTH, WIDTH), torch.nan), torch.zeros(WIDTH)
BAD_A = [
    ("1.0.linear.bias", None, "is not complete: 1.0.linear.bias is missing"),
    ("0.0.linear.weight", None, "is not complete: 0.0.linear.weight is missing"),
    ("1.1.weight", None, "is not complete: 1.1.weight is missing"),
    ("4.0.linear.weight", torch.zeros(WIDTH, WIDTH), "is not complete: 3.1.weight is missing"),
    ("lm_head.weight", FLAT, "holds lm_head.weight, which this kind of head does not have"),
    ("0.0.linear.weight", NAN, "0.0.linear.weight holds values that are no numbers"),
    ("0.0.linear.weight", FLAT, r"0.0.linear.weight has shape \[16\], and is no matrix"),
    ("2.1.weight", torch.zeros(7, WIDTH), "damaged: medusa heads have one number of output rows, but these have"),
    ("2.1.weight", torch.zeros(VOCAB, 3), "damaged: a head of width 16 has output rows of width 3"),
    ("2.0.linear.weight", torch.zeros(3, 3), r"2.0.linear.weight has shape \[3, 3\]"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD_A)
def test_damaged_folders_of_the_authors(tmp_path: Path, name: str, value: Tensor | None, said: str) -> None:
    tensors = {**layout_a(heads(3, dtype=torch.float32)), name: value}
    write_plain(tmp_path, CONFIG, {key: one for key, one in tensors.items() if one is not None})
    refused(tmp_path, said)


BAD_C = [
    ("blocks.1.layers.0.weight", None, {}, "is not complete: blocks.1.layers.0.weight is missing"),
    ("lm_heads.2.weight", None, {}, "is not complete: lm_heads.2.weight is missing"),
    ("blocks.0.layers.1.weight", torch.zeros(WIDTH, WIDTH), {}, "holds blocks.0.layers.1.weight, which this kind of"),
    ("blocks.0.layers.0.bias", None, {}, "is not complete: blocks.0.layers.0.bias is missing"),
    ("blocks.0.layers.0.weight", NAN, {}, "blocks.0.layers.0.weight holds values that are no numbers"),
    ("norm.weight", FLAT, {}, "holds norm.weight, which this kind of head does not have"),
    ("norm.weight", None, {"medusa_fc_bias": False}, "holds blocks.0.layers.0.bias and 2 more, which this kind"),
    ("norm.weight", None, {"num_heads": 4}, "is not complete: lm_heads.3.weight is missing"),
    ("norm.weight", None, {"num_heads": "many"}, "says that num_heads is 'many'; it must be a number"),
    ("token_map", torch.tensor([1, 1]), {"truncated_vocab_size": 2}, "token_map names a token twice, or one that is"),
    ("token_map", torch.tensor([1, 24]), {"truncated_vocab_size": 2}, "or one that is none of the 24"),
    (
        "token_map",
        torch.tensor([1, 2]),
        {"truncated_vocab_size": 2, "vocab_size": 30},
        "lm_heads.0.weight has 24 rows, and token_map names 2 of 30 tokens",
    ),
]


@pytest.mark.parametrize(("name", "value", "changes", "said"), BAD_C)
def test_damaged_folders_of_vllm(
    tmp_path: Path, name: str, value: Tensor | None, changes: dict[str, Any], said: str
) -> None:
    own = heads(3, dtype=torch.float32)
    tensors = {**layout_c(own), name: value}
    write_plain(tmp_path, config_c(own, **changes), {key: one for key, one in tensors.items() if one is not None})
    refused(tmp_path, said)


def test_a_file_that_runs_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plain(tmp_path, CONFIG, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save({**layout_a(heads(1)), "1.0.linear.weight": Malice()}, tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "medusa_lm_head.pt is damaged .*holds more than numbers")
    assert not (tmp_path / "was-run").exists()


def refused(folder: Path, said: str) -> None:
    """Check that a folder is refused in one sentence that says this."""
    with pytest.raises(CheckpointError, match=said) as error:
        load_head(folder)
    assert "\n" not in str(error.value) and str(error.value).endswith(".") and str(error.value).count(". ") == 0


def test_heads_of_a_table_that_is_padded_less_draft_from_their_rows() -> None:
    """A target may have more rows than its heads, one in 64; what the heads list is not the whole vocabulary then."""
    torch.manual_seed(0)
    padded, width = tiny_model(vocab=130), 16
    rows = [torch.nn.Linear(width, 128, bias=False) for _ in range(3)]
    drafter = of_medusa(MedusaHeads([MedusaHead(width, 1, one) for one in rows], width).double().requires_grad_(False))
    options: dict[str, Any] = {"max_new_tokens": 20, "policy": Chain(2)}
    found = polydraft.generate(padded, [1, 2, 3], drafter=drafter, temperature=1.0, seed=0, **options)
    assert found.statistics.drafted > 0 and not found.statistics.fallback
    plain = polydraft.generate(padded, [1, 2, 3], drafter="none", temperature=0.0, **options)
    greedy = polydraft.generate(padded, [1, 2, 3], drafter=drafter, temperature=0.0, **options)
    assert greedy.sequences.tolist() == plain.sequences.tolist()
