"""Texts with a grammar: those of Hugging Face with a mask token by token, whatever is drafted and beside whom."""

import copy
import json
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from doubles import perturbed, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

import polydraft
from polydraft import Chain, Fixed, Grammar, Pair, TopDown, Widths, load_pair
from polydraft.errors import InvalidParameter, MissingExtra, PolydraftError, VocabularyMismatch
from polydraft.models.grammar.masks import Walk
from polydraft.trees import EAGLE_25
from polydraft.verifiers import RecursiveRejection

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WORDS = "[a-z]{2,6}(, [a-z]{2,5}){1,3}"
RULES = 'start: "if" " " NAME ":" BODY\nNAME: /[a-z]{1,6}/\nBODY: " pass" | " return" | " return " NAME'
GRAMMARS = [Grammar.json_schema(SCHEMA), Grammar.regex(WORDS), Grammar.lark(RULES)]
PROMPT = "def parse("


class Masked(LogitsProcessor):
    """A grammar as anybody would write it: token by token, one matcher, one row."""

    def __init__(self, grammar: Grammar, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        from llguidance.hf import from_tokenizer

        tokens = from_tokenizer(tokenizer, n_vocab=size)  # type: ignore[arg-type]
        self.matcher = llguidance.LLMatcher(tokens, grammar.source, log_level=0)
        self.begun = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.begun:
            assert self.matcher.consume_token(int(input_ids[0, -1]))
        self.begun = True
        mask = int.from_bytes(self.matcher.compute_bitmask(), "little")
        kept = torch.tensor([bool(mask >> place & 1) for place in range(scores.shape[-1])])
        return scores.masked_fill(~kept, -torch.inf)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair()


@pytest.fixture(scope="module")
def ids(pair: Pair) -> Tensor:
    return pair.tokenizer(PROMPT, return_tensors="pt").input_ids


def text_of(pair: Pair, tokens: Sequence[int]) -> str:
    return pair.tokenizer.decode([one for one in tokens if one != pair.tokenizer.eos_token_id])


def plain(pair: Pair, ids: Tensor, grammar: Grammar, **options: Any) -> Tensor:
    masks = LogitsProcessorList([Masked(grammar, pair.tokenizer, pair.target.config.vocab_size)])
    usual = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False, "max_new_tokens": 40}
    return pair.target.generate(ids, logits_processor=masks, **{**usual, **options})


@pytest.mark.long(3)
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda one: one.kind)
@pytest.mark.parametrize("drafter", ["none", None, "model", "ngram"])
def test_greedy_text_is_hugging_faces(pair: Pair, ids: Tensor, grammar: Grammar, drafter: Any) -> None:
    drafter = pair.draft if drafter == "model" else drafter
    output = polydraft.generate(
        pair.target, ids, grammar=grammar, tokenizer=pair.tokenizer, drafter=drafter, temperature=0, max_new_tokens=40
    )
    assert torch.equal(output.sequences, plain(pair, ids, grammar))
    assert "GrammarLogitsProcessor" in output.statistics.in_force


@pytest.mark.parametrize("policy", [Chain(4), Fixed(EAGLE_25), Widths((4, 3, 2))], ids=str)
def test_greedy_text_of_a_tiny_model_with_good_drafts(policy: Any) -> None:
    tokenizer = tiny_tokenizer()
    model, grammar = tiny_model("llama", len(tokenizer)), Grammar.regex("[^aeiou0-9]{10}([0-9]|[^aeiou]{2}){5,30}!")
    own = Pair(model, None, tokenizer)
    ids = torch.tensor([tokenizer("a b").input_ids])
    expected = plain(own, ids, grammar, eos_token_id=0, max_new_tokens=60)
    output = polydraft.generate(
        model,
        ids,
        grammar=grammar,
        tokenizer=tokenizer,
        drafter=perturbed(model, 0.03),
        policy=policy,
        temperature=0,
        eos_token_id=0,
        pad_token_id=0,
        max_new_tokens=60,
    )
    assert torch.equal(output.sequences, expected)
    assert output.statistics.accepted > 0


def test_processors_and_filters_stand_around_it(pair: Pair, ids: Tensor) -> None:
    """The user's processors come first, temperature and filters last: Hugging Face's own order."""

    class Liking(LogitsProcessor):
        stateless = True

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + torch.arange(scores.shape[-1]) % 7

    grammar = Grammar.regex(WORDS)
    options: dict[str, Any] = {"repetition_penalty": 1.3, "max_new_tokens": 30}
    masks = LogitsProcessorList([Liking(), Masked(grammar, pair.tokenizer, pair.target.config.vocab_size)])
    usual = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
    expected = pair.target.generate(ids, logits_processor=masks, **usual, **options)
    given = {"grammar": grammar, "tokenizer": pair.tokenizer, "logits_processor": [Liking()], **options}
    output = polydraft.generate(pair.target, ids, **given)
    assert torch.equal(output.sequences, expected)
    sampled = polydraft.generate(pair.target, ids, temperature=0.9, top_k=5, seed=0, **given)
    assert sampled.statistics.in_force == (
        "RepetitionPenaltyLogitsProcessor",
        "Liking",
        "GrammarLogitsProcessor",
        "temperature=0.9",
        "top_k=5",
    )


@pytest.mark.long(2)
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.01, "top_k": 0}, {"typical_p": 0.3}, {"min_p": 0.9}])
def test_filters_act_on_masked_rows(pair: Pair, ids: Tensor, filters: dict[str, Any]) -> None:
    """A filter never leaves a grammar without a token, for it sees none but the grammar's."""
    output = polydraft.generate(
        pair.target,
        ids,
        grammar=GRAMMARS[0],
        tokenizer=pair.tokenizer,
        temperature=1.5,
        seed=3,
        max_new_tokens=40,
        **filters,
    )
    if output.finish == ("eos",):
        json.loads(text_of(pair, output.sequences[0, ids.shape[1] :].tolist()))


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 1.5])
def test_every_finished_text_is_in_the_grammar(pair: Pair, ids: Tensor, temperature: float) -> None:
    prompts = {f"{kind}{place}": ids[0] for kind in "jr" for place in range(25)}
    own = {name: {"grammar": GRAMMARS[0] if name[0] == "j" else GRAMMARS[1]} for name in prompts}
    run = polydraft.generate_many(
        pair.target,
        prompts,
        per_prompt=own,
        tokenizer=pair.tokenizer,
        temperature=temperature,
        top_k=0,
        seed=1,
        max_new_tokens=64,
        drafter=pair.draft,
        policy=Chain(3),
        batch_size=10,
    )
    finished = 0
    for one in run:
        text = text_of(pair, one.tokens)
        if one.finish != "eos":
            assert one.finish == "length"
            continue
        finished += 1
        if str(one.name)[0] == "r":
            assert re.fullmatch(WORDS, text)
            continue
        value = json.loads(text)
        assert [*value] == ["name", "age", "tags"] and 0 <= value["age"] <= 130 and len(value["name"]) <= 12
        assert {*value["tags"]} <= {"red", "blue", "green"} and len(value["tags"]) <= 3
    assert finished > 45


def test_many_texts_are_those_of_single_runs(pair: Pair, ids: Tensor) -> None:
    prompts = [ids[0], ids[0, :2], ids[0], ids[0]]
    own = {0: {"grammar": GRAMMARS[0]}, 1: {"grammar": None}, 2: {"seed": 5}, 3: {"temperature": 1.3}}
    common: dict[str, Any] = {"grammar": GRAMMARS[1], "tokenizer": pair.tokenizer, "max_new_tokens": 24}
    common |= {"temperature": 1.0, "drafter": pair.draft, "policy": Widths((2, 1)), "top_k": 0}
    common["verifier"] = TopDown(RecursiveRejection())
    for one in polydraft.generate_many(pair.target, prompts, per_prompt=own, seed=0, batch_size=2, **common):
        options = {**common, **own[int(str(one.name))], "seed": one.seed}
        alone = polydraft.generate(pair.target, prompts[int(str(one.name))][None], **options)
        assert alone.sequences[0, len(prompts[int(str(one.name))]) :].tolist() == one.tokens


def test_rows_of_a_padded_batch_each_follow_it(pair: Pair, ids: Tensor) -> None:
    rows = torch.tensor([[0, 0, *ids[0].tolist()], [0, 0, 0, *ids[0, :2].tolist()]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    options: dict[str, Any] = {"grammar": GRAMMARS[1], "tokenizer": pair.tokenizer, "max_new_tokens": 30}
    output = polydraft.generate(pair.target, rows, attention_mask=mask, num_return_sequences=1, **options)
    for row, prompt in ((0, ids), (1, ids[:, :2])):
        alone = polydraft.generate(pair.target, prompt, **options).sequences[0, prompt.shape[1] :].tolist()
        assert output.sequences[row, 5:].tolist()[: len(alone)] == alone


def test_a_stream_a_past_and_an_interrupt(pair: Pair, ids: Tensor) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS[1], "tokenizer": pair.tokenizer, "max_new_tokens": 30}
    whole = polydraft.generate(pair.target, ids, keep_past=True, **options)
    run = polydraft.stream(pair.target, ids, **options)
    assert run.exhaust().new_tokens[0] == whole.sequences[0, ids.shape[1] :].tolist()
    again = polydraft.generate(pair.target, ids, past=whole.past, **options)
    assert torch.equal(again.sequences, whole.sequences)


def test_log_probabilities_are_the_models_own(pair: Pair, ids: Tensor) -> None:
    output = polydraft.generate(
        pair.target, ids, grammar=GRAMMARS[1], tokenizer=pair.tokenizer, max_new_tokens=8, output_logprobs=0
    )
    assert output.logprobs is not None
    with torch.no_grad():
        rows = pair.target(output.sequences).logits[0].double().log_softmax(dim=-1)
    for place, one in enumerate(output.logprobs[0], ids.shape[1]):
        assert one.logprob == pytest.approx(float(rows[place - 1, one.token]), abs=1e-4)


def test_the_mask_of_every_node_is_its_own(pair: Pair, ids: Tensor) -> None:
    """Scores that tokens were chosen by are -inf for whatever the grammar forbids there."""
    output = polydraft.generate(
        pair.target,
        ids,
        grammar=GRAMMARS[1],
        tokenizer=pair.tokenizer,
        drafter=pair.draft,
        policy=Widths((3, 2)),
        temperature=1.0,
        top_k=0,
        seed=2,
        max_new_tokens=20,
        output_scores=True,
    )
    made = Masked(GRAMMARS[1], pair.tokenizer, pair.target.config.vocab_size)
    text = output.sequences[:, : ids.shape[1]]
    assert output.scores is not None
    for token, scores in zip(output.sequences[0, ids.shape[1] :], output.scores, strict=True):
        kept = made(text, torch.zeros(1, scores.shape[-1])) == 0
        assert torch.equal(kept[0], scores[0] > -torch.inf)
        text = torch.cat([text, token.view(1, 1)], dim=-1)


# --- Where a text ends ----------------------------------------------------------------------------------------------


def tiny(**options: Any) -> tuple[Any, str]:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", 128)
    ids = torch.tensor([tokenizer("a b").input_ids])
    usual = {"drafter": perturbed(model, 0.03), "policy": Chain(3), "temperature": 1.0, "seed": 0, "eos_token_id": 0}
    usual |= {
        "pad_token_id": 0,
        "max_new_tokens": 30,
        "tokenizer": tokenizer,
        "verifier": TopDown(RecursiveRejection()),
    }
    output = polydraft.generate(model, ids, **{**usual, **options})
    return output, tokenizer.decode([one for one in output.sequences[0, ids.shape[1] :].tolist() if one])


def test_padding_rows_of_the_output_layer_are_never_written() -> None:
    """The tokenizer has 101 tokens, the model 128 ids."""
    for seed in range(5):
        output, text = tiny(grammar=Grammar.regex(r"(.|\n){40}"), seed=seed)
        assert output.sequences.max() < 101 and len(text) >= 30


def test_every_end_of_text_id_may_come_where_the_grammar_ends_and_nowhere_else() -> None:
    tokenizer = tiny_tokenizer()
    letter = tokenizer.convert_tokens_to_ids("z")  # an end of text that is a letter of the grammar too
    ends = set()
    for seed in range(40):
        output, text = tiny(grammar=Grammar.regex("[yz]{2,4}"), eos_token_id=[0, 127, letter], seed=seed)
        tokens = output.sequences[0, 2:].tolist()
        assert output.finish == ("eos",) and tokens[-1] in (0, 127, letter) and letter not in tokens[:-1]
        ends.add(tokens[-1])
        assert 2 <= len(text.removesuffix("z")) <= 4
    assert len(ends) > 1


@pytest.mark.parametrize("drafts", [True, False])
def test_a_model_without_an_end_stops_where_the_grammar_is_complete(drafts: bool) -> None:
    options = {} if drafts else {"drafter": "none"}
    output, text = tiny(grammar=Grammar.regex("[a-c]{5}!"), eos_token_id=None, **options)
    assert output.finish == ("stop",) and re.fullmatch("[a-c]{5}!", text)
    output, text = tiny(grammar=Grammar.regex("[a-c]+"), eos_token_id=None, **options)
    assert output.finish == ("length",) and re.fullmatch("[a-c]+", text)


def test_an_empty_text_may_be_all() -> None:
    output, text = tiny(grammar=Grammar.regex(""))
    assert output.finish == ("eos",) and not text


def test_what_other_processors_forbid_ends_the_text() -> None:
    """min_new_tokens beyond the grammar's longest text, a forced end of text, suppressed letters, stop strings."""
    output, text = tiny(grammar=Grammar.regex("[a-c]{3}"), min_new_tokens=10)
    assert output.finish == ("eos",) and re.fullmatch("[a-c]{3}", text)
    output, text = tiny(grammar=Grammar.regex("[a-c]{3,9}"), min_new_tokens=8)
    assert output.finish == ("eos",) and re.fullmatch("[a-c]{7,9}", text)
    output, text = tiny(grammar=Grammar.regex("[a-c]{50}"), forced_eos_token_id=0, max_new_tokens=6)
    assert output.finish == ("eos",) and re.fullmatch("[a-c]{5}", text)
    letters = tiny_tokenizer().convert_tokens_to_ids([*"abc"])
    output, text = tiny(grammar=Grammar.regex("x[a-c]{3}"), suppress_tokens=letters)
    assert output.finish == ("eos",) and text == "x"
    output, text = tiny(grammar=Grammar.regex("x[a-c]{3}"), suppress_tokens=letters, eos_token_id=None)
    assert output.finish == ("stop",) and re.fullmatch("x[a-c]{3}", text)
    output, text = tiny(grammar=Grammar.regex("[ab]{2}xy[ab]{9}"), stop_strings=["xy"])
    assert output.finish == ("stop",) and re.fullmatch("[ab]{2}xy", text)


def test_where_the_tokens_do_not_suffice_the_text_ends_with_a_warning() -> None:
    """No token of the tokenizer spells what comes next; drafts that lead there cost nothing."""
    with pytest.warns(RuntimeWarning, match="ends before its grammar is complete: no token goes on"):
        output, text = tiny(grammar=Grammar.regex("[ab]{3}é"))
    assert output.finish == ("stop",) and re.fullmatch("[ab]{3}", text)


def test_where_llguidance_gives_up_the_text_ends_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = llguidance.LLMatcher

    def limited(*inputs: Any, **named: Any) -> Any:
        return kind(*inputs, **named, limits=llguidance.LLParserLimits(step_max_items=20))

    limited.grammar_from_lark, limited.validate_grammar = kind.grammar_from_lark, kind.validate_grammar  # type: ignore[attr-defined]
    monkeypatch.setattr(llguidance, "LLMatcher", limited)
    grammar = Grammar.lark('start: a+\na: "x" a* | "x" "x" a')
    with pytest.warns(RuntimeWarning, match="ends before its grammar is complete"):
        output, text = tiny(grammar=grammar, eos_token_id=None)
    assert output.finish == ("stop",) and re.fullmatch("x+", text)


def test_rules_may_name_an_end_of_text() -> None:
    output, text = tiny(grammar=Grammar.lark('start: "a" <end>'))
    assert output.finish == ("eos",) and text == "a"


def test_drafts_outside_the_grammar_cost_nothing_but_the_draft(pair: Pair, ids: Tensor) -> None:
    """A prediction that leaves the grammar at once, and one that goes on behind its end."""
    expected = plain(pair, ids, GRAMMARS[1])
    for prediction in ("12345 12345 12345", text_of(pair, expected[0, ids.shape[1] :].tolist()) + " and so on"):
        output = polydraft.generate(
            pair.target, ids, grammar=GRAMMARS[1], tokenizer=pair.tokenizer, prediction=prediction, max_new_tokens=40
        )
        assert torch.equal(output.sequences, expected)


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("json_schema", "{nope", "is no JSON"),
        ("json_schema", "[1]", "an object or a boolean"),
        ("json_schema", '{"a": NaN}', "is no JSON"),
        ("json_schema", 3, "a mapping or its JSON text"),
        ("json_schema", {"type": {1, 2}}, "cannot be written as JSON"),
        ("json_schema", {"type": "strin"}, "Invalid type: strin"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"$ref": "#/nope"}, "nope"),
        ("json_schema", {"type": "string", "pattern": "(a"}, "unclosed group"),
        ("json_schema", {"enum": []}, "Unsatisfiable"),
        ("json_schema", False, "Unsatisfiable"),
        ("json_schema", "[" * 100_000, "is no JSON"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "a\x1b[31m(", "unclosed"),
        ("regex", 3, "must be a text"),
        ("regex", "\ud800", "surrogate"),
        ("regex", "a" * 2_000_000, "at most"),
        ("lark", "", "Empty grammar"),
        ("lark", "start: foo", "unknown name"),
        ("lark", 'x: "a"', "no start rule"),
        ("lark", 'start: "\x07" (', "lexer error"),
    ],
)
def test_what_is_no_grammar_is_one_sentence(kind: str, given: Any, said: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        getattr(Grammar, kind)(given)
    text = str(caught.value)
    assert said in text and text.endswith(".") and text.isprintable() and len(text) < 300


@pytest.mark.parametrize(
    "grammar",
    [Grammar.regex(r"[^\x00-\U0010ffff]"), Grammar.lark("start: start"), Grammar.regex("é")],
    ids=["nothing", "endless", "unspelt"],
)
def test_a_grammar_that_allows_nothing_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidParameter, match="allows no text at all"):
        tiny(grammar=grammar)


def test_what_fits_no_grammar_is_refused(pair: Pair, ids: Tensor) -> None:
    one = Grammar.json_object()
    for given in ("[a-z]", {"type": "object"}, Grammar, 3):
        with pytest.raises(InvalidParameter, match="grammar must be a Grammar such as"):
            polydraft.generate(pair.target, ids, grammar=given, tokenizer=pair.tokenizer)
    with pytest.raises(InvalidParameter, match="tokenizer must be a tokenizer"):
        polydraft.generate(pair.target, ids, grammar=one, tokenizer="gpt2")
    with pytest.raises(VocabularyMismatch, match="another model's"):
        polydraft.generate(pair.target, ids, grammar=one, tokenizer=tiny_tokenizer())
    other = copy.deepcopy(pair.tokenizer)
    other.name_or_path = "elsewhere"
    assert polydraft.generate(pair.target, ids, grammar=Grammar.regex("a"), tokenizer=other, max_new_tokens=2)
    model = tiny_model("llama", 128)
    model.name_or_path = ""
    with pytest.raises(InvalidParameter, match="grammar needs the tokenizer argument"):
        polydraft.generate(model, ids[:, -1:], grammar=one, eos_token_id=0, pad_token_id=0)
    for call in (polydraft.stream, polydraft.generate_many):
        with pytest.raises(InvalidParameter, match="grammar must be a Grammar such as"):
            call(pair.target, ids, grammar="a", tokenizer=pair.tokenizer)


def test_another_tokenizer_of_the_same_size_is_refused(pair: Pair, ids: Tensor) -> None:
    swapped = copy.deepcopy(pair.tokenizer)
    spelt = json.loads(swapped.backend_tokenizer.to_str())
    words = spelt["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spelt)))
    with pytest.raises(VocabularyMismatch, match=r"another model's: id \d+ is 'b', but the model's own has 'a'"):
        polydraft.generate(pair.target, ids, grammar=Grammar.regex("a"), tokenizer=other)


def test_without_a_tokenizer_the_models_own_is_taken(pair: Pair, ids: Tensor) -> None:
    output = polydraft.generate(pair.target, ids, grammar=GRAMMARS[1], max_new_tokens=40)
    assert torch.equal(output.sequences, plain(pair, ids, GRAMMARS[1]))


def test_a_slow_tokenizer_is_refused(ids: Tensor) -> None:
    from transformers import PreTrainedTokenizer

    class Slow(PreTrainedTokenizer):
        vocab_size = 100  # type: ignore[assignment]

        def get_vocab(self) -> dict[str, int]:
            return {str(place): place for place in range(100)}

    with pytest.raises(InvalidParameter, match="needs a fast tokenizer"):
        tiny(grammar=Grammar.regex("a"), tokenizer=Slow())


def test_without_llguidance_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r'A grammar needs llguidance, .*: pip install "llguidance>'):
        Grammar.regex("a")


def test_a_grammar_is_a_value() -> None:
    import pickle

    one = Grammar.json_schema(SCHEMA)
    assert one == Grammar.json_schema(json.dumps(SCHEMA)) and hash(one) == hash(copy.deepcopy(one))
    assert pickle.loads(pickle.dumps(one)) == one and one != Grammar.json_object()
    assert issubclass(InvalidParameter, PolydraftError)


def test_nothing_is_said_on_the_way(pair: Pair, ids: Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options: dict[str, Any] = {"temperature": 1.0, "seed": 0, "max_new_tokens": 30}
        polydraft.generate(pair.target, ids, grammar=GRAMMARS[0], tokenizer=pair.tokenizer, **options)
    assert capfd.readouterr() == ("", "")


# --- Other models, and steps that are taken again -------------------------------------------------------------------


@pytest.mark.parametrize("forced", [None, 7])
def test_an_encoder_decoders_text_follows_it(forced: int | None) -> None:
    """A first token that is forced is not the grammar's."""
    tokenizer = tiny_tokenizer()
    model = tiny_model("t5", 101, decoder_start_token_id=0, eos_token_id=0)
    ids, pattern = torch.tensor([tokenizer("a b").input_ids]), "[a-c]{4}(!|[?]{2})"
    options: dict[str, Any] = {"grammar": Grammar.regex(pattern), "tokenizer": tokenizer, "eos_token_id": 0}
    options |= {"max_new_tokens": 20, "pad_token_id": 0, "forced_bos_token_id": forced}
    for temperature in (0, 1.0):
        output = polydraft.generate(model, ids, temperature=temperature, seed=0, drafter="none", **options)
        drafted = polydraft.generate(model, ids, temperature=temperature, seed=0, **options)
        for one in (output, drafted):
            tokens = one.sequences[0, 1:].tolist()
            if forced is not None:
                assert tokens.pop(0) == forced
            assert one.finish == ("eos",) and re.fullmatch(pattern, tokenizer.decode(tokens[:-1]))
        if temperature == 0:
            assert torch.equal(output.sequences, drafted.sequences)


def test_a_model_that_scores_chains_only() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("bloom", 101)
    ids, grammar = torch.tensor([tokenizer("a b").input_ids]), Grammar.regex("[a-c]{4}[!?]")
    options: dict[str, Any] = {"grammar": grammar, "tokenizer": tokenizer, "eos_token_id": 0, "pad_token_id": 0}
    plain = polydraft.generate(model, ids, drafter="none", max_new_tokens=9, **options)
    drafted = polydraft.generate(model, ids, drafter=perturbed(model, 0.03), max_new_tokens=9, **options)
    assert torch.equal(plain.sequences, drafted.sequences) and plain.finish == ("eos",)


@pytest.mark.parametrize("place", ["_led", "_found"])
def test_a_step_that_was_interrupted_is_taken_again(
    pair: Pair, ids: Tensor, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS[1], "tokenizer": pair.tokenizer, "max_new_tokens": 20}
    options |= {"drafter": pair.draft, "policy": Widths((3, 2)), "temperature": 1.0, "seed": 4}
    expected = polydraft.stream(pair.target, ids, **options).exhaust().new_tokens
    own, calls = getattr(Walk, place), 0

    def interrupted(self: Walk, *inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        found = own(self, *inputs)
        if calls in (3, 17, 40, 41, 77):
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Walk, place, interrupted)
    run, again = polydraft.stream(pair.target, ids, **options), 0
    while not run.over:
        try:
            next(run)
        except KeyboardInterrupt:
            again += 1
    assert run.new_tokens == expected and again >= 2


def test_a_grammar_is_compiled_once(pair: Pair, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kind = [], llguidance.LLMatcher

    class Counted:
        grammar_from_regex, validate_grammar = kind.grammar_from_regex, kind.validate_grammar

        def __new__(cls, *inputs: Any, **named: Any) -> Any:
            made.append(inputs)
            return kind(*inputs, **named)

    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    grammar = Grammar.regex("[a-z]{2}[0-9]{1,3}")
    options: dict[str, Any] = {"grammar": grammar, "tokenizer": pair.tokenizer, "max_new_tokens": 8}
    assert len([*polydraft.generate_many(pair.target, [ids[0]] * 5, **options)]) == 5
    assert len(made) == 1
