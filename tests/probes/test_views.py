"""The target drafting for itself by views of all its keys: what they say, and what is left of it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import Memory, Toy, distance, law_of
from doubles import tiny_model
from torch import Tensor
from transformers import PreTrainedModel
from views import close, over_the_models_keys, skipping, without

import polydraft
from polydraft.drafters import (
    ByDepthDrafter,
    Drafter,
    DraftRequest,
    NestedDrafter,
    NgramDrafter,
    Recent,
    SelfDrafter,
    Session,
    Snap,
    View,
    own_model,
    route_first,
)
from polydraft.errors import InvalidParameter, PolydraftError, UnsupportedModel
from polydraft.models import HuggingFaceModel, LayerSet, skip_sets
from polydraft.models.checkpoints.tiny_folder import tiny_tokenizer
from polydraft.models.derived import derived
from polydraft.models.layers.variants import first_of
from polydraft.models.tiny import tiny_of_type
from polydraft.probs import Noise, SamplingParams
from polydraft.reading import Reader, Text
from polydraft.schemes import IID, Given, TopK, WithoutReplacement
from polydraft.trees import Chain, Draft, Resume, TreePolicy, Verdict, Widths
from polydraft.verifiers import BlockVerification, ByShape, NaiveMatch, Optimal, PathVerifier, TopDown

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 8], [2, 7, 1, 8, 2, 8]]
VIEWS = {
    "int8": View("int8"),
    "int4": View("int4"),
    "skip": View(layers=skipping(1)),
    "skip-mlp": View(layers=skipping(mlp=[0, 2])),
    "exit": View(layers=skipping(exit=2)),
    "int8 of few layers": View("int8", skipping(attention=[0], exit=2)),
    "int8 of few keys": View("int8", keys=Recent(1, 2)),
}


WIDE = {"hidden_size": 32, "intermediate_size": 32}
"""Sizes of targets whose rows of weights are long enough for four bits."""


def text_of(rows: Sequence[Sequence[int]]) -> Text:
    tokens = torch.full((len(rows), 32), 11)
    for row, own in enumerate(rows):
        tokens[row, : len(own)] = torch.tensor(own)
    return Text(tokens, torch.tensor([*map(len, rows)]))


def drafted(drafter: SelfDrafter, reader: Reader, text: Text, policy: TreePolicy, scheme: Any) -> Draft:
    """Return what a drafter drafts behind texts that the target has read."""
    state = drafter.start(text, Session(SamplingParams(), 48, 24, reader))
    request = DraftRequest(text, scheme, policy, Noise.from_seed(1, len(text.lengths)), reader)
    return drafter.draft(state, request)[0]


# What they say.


@pytest.mark.long(6)
@pytest.mark.parametrize("policy", [Chain(3), Widths((2, 2, 1))], ids=str)
@pytest.mark.parametrize("view", [name for name in VIEWS if "keys" not in name])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "mistral"])
def test_rows_at_all_depths_are_those_over_the_targets_keys(
    kind: str, view: str, policy: TreePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chain and of a tree, in rows that are not equally far; behind it the target's own rows are as before."""
    narrow = ({"sliding_window": 4} if kind == "mistral" else {}) | (WIDE if view == "int4" else {})
    model, one = tiny_model(kind, num_hidden_layers=3, dtype=torch.float32, **narrow), VIEWS[view]
    target, text, rows = HuggingFaceModel(model), text_of(ROWS), list[Tensor]()
    proposed = polydraft.drafters.itself.self_drafter.draft_rows

    def noted(logits: Tensor, *rest: Any) -> Any:
        rows.append(logits)
        return proposed(logits, *rest)

    monkeypatch.setattr("polydraft.drafters.itself.self_drafter.draft_rows", noted)
    reader = Reader.new(target, len(ROWS), 48).catch_up(text)[0]
    tree = drafted(SelfDrafter(one), reader, text, policy, IID()).tree
    found = torch.cat(rows, dim=1)
    exit = one.layers.exit or 3
    seen = without(
        model, LayerSet(one.layers.skipped_attention | {*range(exit, 3)}, one.layers.skipped_mlp | {*range(exit, 3)})
    )
    other, tolerance = (derived(seen, f"self:{one.weights}"), 0.05) if one.weights else (seen, 1e-4)
    for at, row in enumerate(ROWS):
        close(found[at], over_the_models_keys(model, other, row, tree, at)[: found.shape[1]], tolerance)
        close(reader.score(text, tree)[0].logits[at], over_the_models_keys(model, model, row, tree, at), 1e-4)


@pytest.mark.parametrize("view", [View(), View(layers=skipping(exit=3))], ids=["all", "exit"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_view_that_is_the_target_accepts_every_draft(view: View, temperature: float, target: PreTrainedModel) -> None:
    ids, mask = torch.tensor([[3, 1, 4, 1, 5], [0, 0, 2, 7, 1]]), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    found = polydraft.generate(
        target, ids, attention_mask=mask, drafter=SelfDrafter(view), policy=3, max_new_tokens=16, seed=3,
        temperature=temperature, top_k=0, pad_token_id=0,
    ).statistics  # fmt: skip
    assert found.drafted and found.accepted >= found.drafted - 6 and not found.fallback, "the last ones may be too many"


# What is left of them: nothing.


@pytest.mark.long(8)
@pytest.mark.parametrize("view", [*VIEWS])
@pytest.mark.parametrize("policy", [3, "2,2,1", "best-first:6x3:3"])
def test_greedy_texts_are_plain_ones(view: str, policy: object, beside: Any) -> None:
    wide = {"model": tiny_model("llama", num_hidden_layers=3, **WIDE)} if view == "int4" else {}
    beside(SelfDrafter(VIEWS[view]), policy, **wide)


@pytest.mark.long(3)
@pytest.mark.parametrize("exit", [1, 2])
@pytest.mark.parametrize("policy", [1, 4, "2,2,1", "1,2,2", "3,1,1", "best-first:6x3:3", "confident:5:0.3"])
def test_the_full_pass_resumes_behind_an_exit(exit: int, policy: object, beside: Any) -> None:
    """In trees whose nodes all ran but for the last ones, in others, and in those that end early."""
    beside(SelfDrafter(View(layers=skipping(exit=exit)), resumes=True), policy)


@pytest.mark.parametrize("view", ["int8", "skip", "exit"])
def test_they_draft_for_some_rows_of_a_running_batch(view: str, target: PreTrainedModel) -> None:
    prompts, options = {"a": [3, 1, 4, 1, 5], "b": [2, 7, 1], "c": [4, 4]}, {"max_new_tokens": 12, "do_sample": False}
    plain = {one.name: one.tokens for one in polydraft.generate_many(target, prompts, drafter="none", **options)}
    own = {name: {"drafter": SelfDrafter(VIEWS[view]), "policy": 3} for name in ("a", "c")}
    for common in ({"drafter": "none"}, {"drafter": SelfDrafter(VIEWS["skip-mlp"]), "policy": "2,1"}):
        run = polydraft.generate_many(target, prompts, batch_size=2, per_prompt=own, **common, **options)
        texts = {one.name: one for one in run}
        assert {name: text.tokens for name, text in texts.items()} == plain and not run.statistics.fallback
        assert all(texts[name].accepted for name in own)


@pytest.mark.parametrize("view", ["int8", "skip-mlp", "exit"])
def test_a_text_goes_on_from_a_past_and_is_taken_back(view: str, target: PreTrainedModel) -> None:
    ids, options = torch.tensor([[3, 1, 4, 1, 5]]), {"max_new_tokens": 8, "do_sample": False}
    drafting = {"drafter": SelfDrafter(VIEWS[view]), "policy": "2,1,1"}
    first = polydraft.generate(target, ids, keep_past=True, **drafting, **options)
    for longer in (torch.cat([first.sequences, ids], 1), torch.cat([first.sequences[:, :8], ids], 1)):
        plain = polydraft.generate(target, longer, drafter="none", **options)
        found = polydraft.generate(target, longer, past=first.past, **drafting, **options)
        assert torch.equal(found.sequences, plain.sequences) and found.statistics.prompt_known >= 7


@pytest.mark.parametrize("view", ["int8", "skip-mlp", "exit"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_draft_that_breaks_off_leaves_the_text(
    view: str, after: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at any depth costs drafts, not keys."""
    ids, calls = torch.tensor([[3, 1, 4, 1, 5]]), [0]
    usual = polydraft.drafters.itself.self_drafter.draft_rows

    def fails(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4 + after:
            raise RuntimeError("it broke")
        return usual(*given)

    plain = polydraft.generate(target, ids, drafter="none", max_new_tokens=12)
    monkeypatch.setattr("polydraft.drafters.itself.self_drafter.draft_rows", fails)
    with pytest.warns(RuntimeWarning, match="it broke"):
        found = polydraft.generate(target, ids, drafter=SelfDrafter(VIEWS[view]), policy=3, max_new_tokens=12)
    assert torch.equal(found.sequences, plain.sequences) and calls[0] == 4 + after


@pytest.mark.long(6)
@pytest.mark.parametrize(
    "drafter", [SelfDrafter(VIEWS["int8"]), SelfDrafter(VIEWS["exit"], True)], ids=["int8", "exit"]
)
@pytest.mark.parametrize("passes", range(2, 9))
def test_a_text_goes_on_behind_an_interrupt_in_any_pass(
    drafter: SelfDrafter, passes: int, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask, usual, left = torch.tensor([[3, 1, 4], [0, 2, 7]]), torch.tensor([[1] * 3, [0, 1, 1]]), [], [passes]
    forward, options = HuggingFaceModel.forward, {"attention_mask": mask, "max_new_tokens": 10, "pad_token_id": 0}
    plain = polydraft.generate(target, ids, drafter="none", **options)

    def interrupted(own: HuggingFaceModel, *given: Any, **named: Any) -> Any:
        made = forward(own, *given, **named)  # its keys are written
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return made

    run = polydraft.stream(target, ids, drafter=drafter, policy="2,1", **options)
    monkeypatch.setattr(HuggingFaceModel, "forward", interrupted)
    while True:
        try:
            usual += [*run]
            break
        except KeyboardInterrupt:
            assert left[0] == 0
    assert torch.equal(run.sequences(ids, 0), plain.sequences)


@pytest.mark.parametrize("view", ["int8", "skip", "int8 of few layers"])
def test_keys_that_a_view_left_would_be_seen(view: str, target: PreTrainedModel) -> None:
    """What the other tests rest on: were a draft kept with the keys that it was drafted by, rows would be others."""
    model, text = HuggingFaceModel(target), text_of(ROWS)
    reader = Reader.new(model, len(ROWS), 48).catch_up(text)[0]
    tree = drafted(SelfDrafter(VIEWS[view]), reader, text, Chain(3), IID()).tree
    path = torch.arange(1, 4).expand(len(ROWS), -1)
    verdict = Verdict(path, torch.full((len(ROWS),), 3), torch.full((len(ROWS),), 5))
    longer = text_of([[*row, *tree.tokens[at, 1:].tolist(), 5] for at, row in enumerate(ROWS)])
    root = type(tree).root_only(longer.last())

    def following(kept: Reader) -> Tensor:
        return kept.keep(text, verdict).score(longer, root)[0].logits

    left = following(replace(reader, read=text.counts))
    right = following(reader.score(text, tree)[1])
    for at, row in enumerate(ROWS):
        wanted = over_the_models_keys(target, target, [*row, *tree.tokens[at, 1:].tolist(), 5], root, at)
        close(right[at], wanted)
    assert float((left - right).abs().max()) > 1e-3


def test_states_at_an_exit_in_another_order_would_be_seen(target: PreTrainedModel) -> None:
    """Behind a rejected branch the full pass goes on from the states of the nodes that it scores, and of no others."""
    model, text = HuggingFaceModel(target), text_of(ROWS)
    reader = Reader.new(model, len(ROWS), 48).catch_up(text)[0]
    draft = drafted(SelfDrafter(View(layers=skipping(exit=2)), resumes=True), reader, text, Widths((2, 2)), IID())
    resume, order = draft.resume, [0, 2, 1, 3, 4, 5, 6]
    assert resume is not None
    scored, after = reader.score(text, draft.tree, draft)
    swapped = replace(draft, resume=Resume(2, resume.states[:, order]))
    assert float((reader.score(text, draft.tree, swapped)[0].logits - scored.logits).abs().max()) > 1e-3
    for at, row in enumerate(ROWS):
        close(scored.logits[at], over_the_models_keys(target, target, row, draft.tree, at))
    scored, after = reader.score(text, draft.tree, draft)
    path = torch.tensor([[2, 5]]).expand(len(ROWS), -1)
    kept = after.keep(text, Verdict(path, torch.full((len(ROWS),), 2), torch.full((len(ROWS),), 5)))
    rows = [[*row, *draft.tree.tokens[at, [2, 5]].tolist(), 5] for at, row in enumerate(ROWS)]
    root = type(draft.tree).root_only(text_of(rows).last())
    for at, row in enumerate(rows):
        close(kept.score(text_of(rows), root)[0].logits[at], over_the_models_keys(target, target, row, root, at))


# Their law.


class Seen(Toy):
    """A toy over the cache of another, whose law is another one."""

    def variant(self, weights: str = "", layers: LayerSet = LayerSet()) -> Toy:  # noqa: B008  a value
        return Toy(self.vocab_size, seed=7)


RULES: list[tuple[PathVerifier, TreePolicy]] = [
    (ByShape(), Chain(2)),
    (TopDown(NaiveMatch(TopK())), Widths((2, 1))),
    (TopDown(Optimal(IID())), Widths((2, 1))),
    (TopDown(Optimal(WithoutReplacement())), Widths((2,))),
]


@pytest.mark.long(2)
@pytest.mark.parametrize(("rule", "policy"), RULES, ids=str)
def test_tokens_follow_the_target(rule: PathVerifier, policy: TreePolicy) -> None:
    target, prompt = Seen(), [0, 2, 1, 1]
    assert isinstance(target.new_cache(1, 2), Memory)
    found, failures = law_of(target, SelfDrafter(View("int8")), rule, policy, [prompt], 4, steps=1)
    assert not failures and distance(found, target.texts(prompt, 4)) < 1e-12


def test_two_rows_follow_the_target() -> None:
    target, prompts = Seen(2), [[0, 1], [1, 1]]
    found, failures = law_of(target, SelfDrafter(View("int8")), ByShape(), Chain(1), prompts, 3, steps=2)
    assert not failures and distance(found, target.texts(prompts[0], 3)) < 1e-12


# Their words.


def test_words_name_views() -> None:
    for word in ("self:int8", "self:int4,exit=8", "self:skip=3-5+9,skip-mlp=1", "self:keys=recent:16+240"):
        assert View.named(word).word == word
    assert View.named("self:skip=3-5+9").layers == skipping(3, 4, 5, 9)
    assert View.named("self:skip-attention=1,skip-mlp=2,int8") == View("int8", skipping(attention=[1], mlp=[2]))
    assert View.named("self:int8,keys=recent,exit=3") == View("int8", skipping(exit=3), Recent())
    assert View.named("self:skip=1,skip=3").layers == skipping(1, 3)


WRONG = {
    "self:": "is not known: one made of the target is self:int8",
    "self:int8,int4": "is not known",
    "self:int8,speed=2": "is not known",
    "self:keys=recent,keys=recent": "is not known",
    "self:exit=0": "An exit lies behind one layer at least, not behind 0",
    "self:exit=two": "exit takes one number of layers",
    "self:exit=2,exit=3": "exit takes one number of layers",
    "self:exit=8,skip=9": "Layer 9 lies behind the exit at 8",
    "self:exit=1,skip=0": "All 1 layers that run are skipped",
    "self:skip=5-3": "begins with its smaller number",
    "self:skip=0-20000000000": "There is no file '0-20000000000': skip takes layers below 10,000",
    "self:int8,,skip=1": "is not known",
    "self:int8,": "is not known",
    "self:exit=2,adapter=": "is not known",
    "self:skip=nowhere.json": "There is no file 'nowhere.json': skip takes layers",
    "self:skip-mlp=all": "skip-mlp takes layers, as skip-mlp=3-5",
    "self:keys=oldest": "keys=oldest' are not known; there are keys=recent:16",
    "self:keys=recent:1+2+3": "are not known; there are",
    "self:keys=recent:1+0": "window must be a whole number of at least 1",
}


@pytest.mark.parametrize(("word", "said"), WRONG.items(), ids=[*WRONG])
def test_words_of_no_view_are_refused_before_anything_is_loaded(word: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as caught:
        polydraft.load("no/such-model", word)
    assert "\n" not in str(caught.value)


PUBLISHED = (
    '{"llama-2-13b": {"attention": [3, 5], "mlp": [6]}, "codellama-13b_humaneval": {"attention": [7], "mlp": []}}'
)
FILES = {
    '{"layers": 3, "attention": [1], "mlp": [0, 2]}': ("", skipping(attention=[1], mlp=[0, 2])),
    '{"only": {"attention": [1], "mlp": []}}': ("", skipping(attention=[1])),
    PUBLISHED: (":llama-2-13b", skipping(attention=[3, 5], mlp=[6])),
}


@pytest.mark.parametrize("text", [*FILES])
def test_files_of_skipped_sub_layers_are_read(text: str, tmp_path: Path) -> None:
    """In the formats of Draft & Verify and of SWIFT, and in our own."""
    (tmp_path / "sets.json").write_text(text)
    name, layers = FILES[text]
    found = View.named(f"self:skip={tmp_path / 'sets.json'}{name}").layers
    assert replace(found, depth=None) == layers and found.depth == (3 if "layers" in text else None)


DRAFT_AND_VERIFY = """{
  "llama-2-13b": {
    "attention": [3, 5, 6, 8, 10, 11, 14, 15, 18, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 33, 34, 35, 36, 37],
    "mlp": [6, 9, 10, 11, 15, 24, 25, 27, 28, 35]
  },
  "llama-2-13b-chat": {"attention": [7, 8, 9], "mlp": [7, 10, 11]}
}"""
SWIFT = """{
  "llama-2-13b_cnndm": {
    "attention": [2, 5, 6, 10, 11, 14, 15, 20, 22, 23, 24, 25, 26, 27, 28, 30, 32, 33, 34, 35],
    "mlp": [9, 11, 14, 15, 19, 20, 24, 25, 26, 27, 28, 29, 30, 31]
  }
}"""
"""Of dilab-zju/self-speculative-decoding and hemingkx/SWIFT, skip_layers.json."""


@pytest.mark.parametrize(("text", "name"), [(DRAFT_AND_VERIFY, "llama-2-13b"), (SWIFT, "llama-2-13b_cnndm")])
def test_published_files_become_words_and_files_of_our_own(text: str, name: str, tmp_path: Path) -> None:
    """A published set, its word and a file of our own with it are one view; our file knows its model's depth."""
    (tmp_path / "theirs.json").write_text(text)
    found, sets = View.named(f"self:skip={tmp_path / 'theirs.json'}:{name}"), json.loads(text)[name]
    assert found.layers == skipping(attention=sets["attention"], mlp=sets["mlp"]) and skip_sets(found.layers) == sets
    assert View.named(found.word) == found
    (tmp_path / "ours.json").write_text(json.dumps(skip_sets(replace(found.layers, depth=40))))
    ours = View.named(f"self:skip={tmp_path / 'ours.json'}")
    assert ours.layers == replace(found.layers, depth=40) and ours.word == found.word
    ours.check(40, 4096)
    with pytest.raises(InvalidParameter, match="for a model of 40 layers, but this one has 32"):
        ours.check(32, 4096)
    with pytest.raises(InvalidParameter, match=r"in this model of 32 layers, but 3[57] is one of them"):
        found.check(32, 4096)
    (tmp_path / "other.json").write_text('{"layers": 32, "attention": [3], "mlp": []}')
    with pytest.raises(InvalidParameter, match="for models of 40 and of 32 layers; take one file"):
        View.named(f"self:skip={tmp_path / 'ours.json'},skip={tmp_path / 'other.json'}")


BAD = {
    "{": "cannot be read: JSONDecodeError",
    "[]": "has sets of no model",
    PUBLISHED: "has sets of codellama-13b_humaneval, llama-2-13b; name one",
    '{"attention": [1.5]}': "must have lists of layers named attention and mlp",
    '{"attention": [1], "speed": 2}': "it has something else",
    '{"attention": [1], "layers": 0}': "it has something else",
    '{"only": 3}': "must have lists",
}


@pytest.mark.parametrize(("text", "said"), BAD.items(), ids=[*BAD])
def test_files_of_anything_else_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "sets.json").write_text(text)
    with pytest.raises(InvalidParameter, match=said):
        View.named(f"self:skip={tmp_path / 'sets.json'}")
    (tmp_path / "sets.json").write_text('{"attention": [1]}')
    with pytest.raises(InvalidParameter, match="has one set, without names; leave :named out"):
        View.named(f"self:skip={tmp_path / 'sets.json'}:named")


UNFIT = {
    "self:exit=15": "Exits lie behind 1 to 14 layers of this model, not behind 15",
    "self:int8,skip=0-9999": "in this model of 14 layers, but 9999 is one of them",
    "self:skip-mlp=0-13,skip-attention=0-13": "All 14 layers that run are skipped",
    "self:keys=snap:1025": "keys=snap:1025 chooses 1025 keys, but the target's context has 1024",
    "self:exit=2,adapter=/no/folder": "There is no model folder '/no/folder'",
    "self:exit=3,adapter=FOLDER": "stands behind 2 layers, not 3",
    "self:exit=2,adapter=FOLDER": "is 77 wide and the target's states 256",
    "self:int8 < ngram < ngram": "must be a model, or one view of the target for all texts.*; ngram is neither",
    "self:skip=auto < ngram": "; self:skip=auto chooses for each text by itself",
    "self:exit=2,adapter=/no/folder < ngram": "has an adapter",
    "pair-head < ngram": "; pair-head is neither",
    "self:int8 < none": "The drafter none drafts nothing",
    "self:int8 < pair-draft < self:int4 < ngram": "at most 3 drafters, but this one has 4",
    "self:int8@2 (self:int4 < pair-draft < self:int8 < ngram)@4": "at most 3 drafters, but this one has 4",
    "self:int8 < self:exit=15": "Exits lie behind 1 to 14 layers",
    "self:int8@99999 < ngram": "drafts of a level have 4095 tokens at most",
    "self:int8@4000 ngram@4000": "drafts of a level have 4095 tokens at most",
    "self:int8@99999": "cannot be read",
    "self:int8 < FOLDER": "have different tokenizers: id 1 is .*; take a draft model of the same family",
}


@pytest.mark.parametrize(("word", "said"), UNFIT.items(), ids=[*UNFIT])
def test_what_the_target_cannot_have_is_refused_before_its_weights_are_read(
    word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    if word.endswith("< FOLDER"):
        tiny_model("llama").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text('{"architectures": ["AdapterModel"], "exit_layer": 2, "hidden_size": 77}')
    with pytest.raises(PolydraftError, match=said) as caught:
        polydraft.load("pair", word.replace("FOLDER", str(tmp_path)))
    assert "\n" not in str(caught.value)


STATES, CHOICES = "remember in states, so self:", "choose what they attend to, so self:"
ROUNDED, QUANTISED = (
    '"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true}, ',
    "are quantised already, so they cannot become int",
)
OF_CONFIGURATIONS = [
    *(("mamba", word, "", STATES) for word in ("keys=recent:1+2", "exit=1", "skip-mlp=0", "skip=auto")),
    ("qwen3_5", "int8,keys=snap:8 < ngram", "", STATES),
    *(("deepseek_v32", word, "", CHOICES) for word in ("keys=recent:1+2", "exit=2", "int8,keys=snap:8 < ngram")),
    *(("llama", word, ROUNDED, QUANTISED) for word in ("int8", "int4,keys=recent:1+2", "int8 < ngram")),
    *(("llama", word, "cuda", "are made for CPUs, but the model is on cuda") for word in ("int8", "int4,exit=1")),
]


@pytest.mark.parametrize(("kind", "word", "how", "said"), OF_CONFIGURATIONS)
def test_layers_and_weights_that_fit_no_view_are_told_by_the_configuration(
    kind: str, word: str, how: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and in one sentence; what drafts as a model of its own is not refused for the kind of its layers."""
    model = tiny_of_type(kind) if kind == "deepseek_v32" else tiny_model(kind)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", "{" + how, 1) if how == ROUNDED else config.read_text())
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights are read"))
    if how == "cuda":
        monkeypatch.setattr(sys.modules["polydraft.engine.load"], "device_named", lambda _: torch.device("cuda"))
    with pytest.raises(UnsupportedModel, match=said) as caught:
        polydraft.load(tmp_path, f"self:{word}")
    assert "\n" not in str(caught.value) and (how == "cuda" or str(tmp_path) in str(caught.value))
    if said in (STATES, CHOICES):
        with pytest.raises(pytest.fail.Exception, match="weights are read"):
            polydraft.load(tmp_path, "self:int8")


@pytest.mark.parametrize(
    ("word", "said"),
    {
        "self:skip=7": "between 0 and 2 in this model of 3 layers, but 7 is one of them",
        "self:exit=4": "Exits lie behind 1 to 3 layers of this model, not behind 4",
        "self:skip=0-2": "All 3 layers that run are skipped",
        "self:skip=FILE": "chosen for a model of 40 layers, but this one has 3",
    }.items(),
)
def test_layers_that_the_target_has_not_are_refused(
    word: str, said: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / "sets.json").write_text('{"attention": [1], "mlp": [], "layers": 40}')
    word = word.replace("FILE", str(tmp_path / "sets.json"))
    with pytest.raises(InvalidParameter, match=said):
        polydraft.generate(target, torch.tensor([[3, 1]]), drafter=word, max_new_tokens=2)


def test_targets_without_views_draft_by_models_of_their_own_or_refuse() -> None:
    ids, target = torch.tensor([[3, 1, 4, 1]]), tiny_model("bloom", dtype=torch.float32, n_layer=2)
    plain = polydraft.generate(target, ids, drafter="none", max_new_tokens=8)
    for word in ("self:int8", "self:skip=1"):
        found = polydraft.generate(target, ids, drafter=word, policy=2, max_new_tokens=8)
        assert torch.equal(found.sequences, plain.sequences) and found.statistics.drafted
    for word in ("self:exit=1", "self:skip-mlp=1", "self:int8,keys=recent"):
        with pytest.raises(UnsupportedModel, match="cannot branch has no keys to draft from"):
            polydraft.generate(target, ids, drafter=word, max_new_tokens=8)


def test_what_needs_a_model_has_that_of_the_words(target: PreTrainedModel) -> None:
    assert own_model(SelfDrafter(View("int8", skipping(1))), target) is derived(target, "self:int8,skip=1")
    assert own_model(SelfDrafter(View(layers=skipping(exit=1))), target) is None
    assert own_model(target, target) is None


@pytest.mark.parametrize(
    "view", [View("int8"), View(), View("int8", skipping(exit=1)), View(layers=skipping(exit=1), keys=Recent())]
)
def test_what_has_no_states_of_the_target_does_not_resume(view: View) -> None:
    with pytest.raises(InvalidParameter, match="leave resumes out"):
        SelfDrafter(view, resumes=True)


OTHERS: dict[str, tuple[Drafter, str]] = {
    "an exit": (
        SelfDrafter(View(layers=skipping(exit=4))),
        "Exits lie behind 1 to 3 layers of this model, not behind 4",
    ),
    "layers": (
        SelfDrafter(View(layers=skipping(7))),
        "between 0 and 2 in this model of 3 layers, but 7 is one of them",
    ),
    "a depth": (
        SelfDrafter(View(layers=replace(skipping(1), depth=40))),
        "chosen for a model of 40 layers, but this one has 3",
    ),
    "keys": (SelfDrafter(View(keys=Snap(5000))), "keys=snap:5000 chooses 5000 keys, but the target's context has"),
    "what resumes": (
        SelfDrafter(View(layers=skipping(exit=3)), resumes=True),
        "3 layers are cut behind 1 to 2, not 3",
    ),
}


@pytest.mark.parametrize("policy", [None, 2])
@pytest.mark.parametrize("case", OTHERS)
def test_views_that_a_target_cannot_have_are_refused_as_their_words_are(
    case: str, policy: int | None, target: PreTrainedModel
) -> None:
    """Alone, before lookups, in front of others and as the middle of a stack; nothing is drafted without them."""
    drafter, said = OTHERS[case]
    given = {"max_new_tokens": 3, "policy": policy}
    stacked = NestedDrafter(drafter, NgramDrafter(), TopDown(NaiveMatch(Given())), Chain(2))  # type: ignore[arg-type]
    for one in (drafter, route_first(drafter), ByDepthDrafter((drafter, NgramDrafter()), (1, 2)), stacked):
        with pytest.raises(InvalidParameter, match=said) as caught:
            polydraft.generate(target, torch.tensor([[3, 1]]), drafter=one, **given)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_a_view_inside_a_stack_is_one_of_the_middle(target: PreTrainedModel) -> None:
    """An exit of the target may be none of the view or model that it drafts for."""
    inside = SelfDrafter(View(layers=skipping(exit=3)))
    for middle in (SelfDrafter(View(layers=skipping(exit=2))), HuggingFaceModel(first_of(target, skipping(exit=2)))):
        drafter = NestedDrafter(middle, inside, BlockVerification(), Chain(2))
        with pytest.raises(InvalidParameter, match="Exits lie behind 1 to 2 layers of this model, not behind 3"):
            polydraft.generate(target, torch.tensor([[3, 1]]), drafter=drafter, max_new_tokens=3)


STRANGE: dict[str, tuple[Any, str]] = {
    "weights": (lambda: View("int3"), "not 'int3'"),
    "layers": (lambda: View(layers=3), "must be a LayerSet, not 3"),  # type: ignore[arg-type]
    "keys": (lambda: View(keys="snap:64"), "must choose keys"),  # type: ignore[arg-type]
    "a word for a view": (lambda: SelfDrafter("self:int8"), "must be a View"),  # type: ignore[arg-type]
    "lists of layers": (lambda: LayerSet([3], [3]), "a frozenset of numbers from 0"),  # type: ignore[arg-type]
    "negative layers": (lambda: LayerSet(frozenset({-1})), "a frozenset of numbers from 0"),
    "endless numbers": (lambda: View.named("self:keys=snap:" + "9" * 5000), "are not known"),
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("case", STRANGE)
def test_arguments_of_other_kinds_are_one_sentence(case: str) -> None:
    make, said = STRANGE[case]
    with pytest.raises(InvalidParameter, match=said):
        make()
