"""Bad input never corrupts or hangs: a named error, or a documented fall back to plain decoding."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from doubles import broken, perturbed, tiny_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import polydraft
from polydraft import (
    Chain,
    GenerationOutput,
    Given,
    HuggingFaceModel,
    ModelDrafter,
    NaiveMatch,
    NgramDrafter,
    NoDraft,
    RecursiveRejection,
    SpeculativeSampling,
    TopDown,
    Widths,
    generate_many,
)
from polydraft.drafters import Drafter, DraftRequest, Session
from polydraft.engine import Ending, Method, Prompts, TargetLaw
from polydraft.engine.loop.step import begin
from polydraft.engine.many.asked import _ids
from polydraft.errors import (
    ContextOverflow,
    InvalidParameter,
    InvalidProbabilities,
    PolydraftError,
    UnpairedScheme,
    VocabularyMismatch,
)
from polydraft.models import check_prompts
from polydraft.probs import Noise
from polydraft.reading import Features, Step, Text
from polydraft.schemes import Scheme
from polydraft.trees import Draft, Pieces

VOCAB, NEW = 24, 12
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


def generate(ids: Tensor = PROMPT, model: PreTrainedModel | None = None, **options) -> GenerationOutput:
    settings = {"drafter": NoDraft(), "max_new_tokens": NEW, "temperature": 0, **options}
    return polydraft.generate(model or target(), ids, **settings)


def good_drafter() -> ModelDrafter:
    return ModelDrafter(HuggingFaceModel(perturbed(target(), 0.05)))


class TestPrompts:
    @pytest.mark.parametrize("shape", [(1, 0), (0, 3), (0, 0)])
    def test_empty(self, shape: tuple[int, int]) -> None:
        with pytest.raises(InvalidParameter, match=r"The prompt is empty: input_ids has shape \(\d, \d\)"):
            generate(torch.zeros(shape, dtype=torch.int64))

    @pytest.mark.parametrize("wrong", [-1, VOCAB, 10**6])
    def test_tokens_of_another_vocabulary(self, wrong: int) -> None:
        with pytest.raises(InvalidParameter, match=f"input_ids has the token {wrong}, but the model's tokens are 0 to"):
            generate(torch.tensor([[1, wrong, 2]]))
        [refused] = generate_many(target(), [torch.tensor([1, wrong, 2])], max_new_tokens=2)
        assert refused.finish == "refused" and f"has the token {wrong}" in refused.error

    def test_padding_that_is_no_token(self) -> None:
        ids, mask = torch.tensor([[-100, 3, 1], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        found = generate(ids, attention_mask=mask, max_new_tokens=4).sequences[:, 3:]
        alone = generate(ids[:1, 1:], max_new_tokens=4).sequences[:, 2:]
        assert torch.equal(found[:1], alone)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("a text", r"must be a tensor of token ids, such as .* but is of type str"),
            ([[1, 2]], "is of type list"),
            (
                torch.ones(3, dtype=torch.int64),
                r"\(rows, tokens\), but has \(3,\); a prompt alone is input_ids\[None\]",
            ),
            (torch.ones(1, 3), "must be integers, but is of type torch.float32"),
        ],
    )
    def test_what_is_no_token_ids(self, given: object, said: str) -> None:
        with pytest.raises(InvalidParameter, match=said):
            check_prompts(given, 50)

    def test_prompts_of_a_batch_that_are_no_token_ids(self) -> None:
        run = generate_many(target(), {"a": [1, 2, 3], "b": torch.tensor([1, 2, 3])}, seed=0, max_new_tokens=4)
        assert {len(one.tokens) for one in run} == {4}
        wrong = (
            (torch.tensor([[1, 2], [3, 4]]), r"one row of token ids, but has shape \(2, 2\)"),
            ({"input_ids": [[1, 2], [3, 4]]}, "one row of token ids, but is a mapping of 2 rows"),
            ({"input_ids": [[1, 2], [3]]}, "one row of token ids, but is a mapping of 2 rows"),
            ("a text", "is of type str"),
        )
        for given, said in wrong:
            with pytest.raises(InvalidParameter, match=f"Prompt 'a' must be .*{said}"):
                _ids("a", given, HuggingFaceModel(target()))

    def test_a_row_of_padding_only(self) -> None:
        mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
        with pytest.raises(ContextOverflow, match="The prompt is empty"):
            generate(torch.ones(2, 3, dtype=torch.int64), attention_mask=mask)

    @pytest.mark.parametrize("length", [128, 150])
    def test_longer_than_the_context(self, length: int) -> None:
        with pytest.raises(ContextOverflow, match=f"The prompt has {length} tokens, but at most 128 fit"):
            generate(torch.ones(1, length, dtype=torch.int64))

    def test_the_loop_itself_checks_too(self) -> None:
        door, text = HuggingFaceModel(target()), Text(PROMPT, torch.tensor([5]))
        method = Method(NoDraft(), TopDown(NaiveMatch()), Chain(1))
        prompts = Prompts(text, (TargetLaw(),), (Ending(max_length=5),), Noise.from_seed(0, 1))
        with pytest.raises(ContextOverflow, match="has 5 tokens, but at most 5 fit"):
            begin(door, method, prompts)


class TestContext:
    @pytest.mark.parametrize("kind", ["llama", "gpt2"])
    def test_generation_stops_cleanly_at_its_end(self, kind: str) -> None:
        model = tiny_model(kind, VOCAB, **{"n_positions" if kind == "gpt2" else "max_position_embeddings": 16})
        draft = ModelDrafter(HuggingFaceModel(perturbed(model, 0.05)))
        with pytest.warns(UserWarning, match=r"cut short by the model's context of 16 tokens, prompt included") as told:
            output = generate(model=model, drafter=draft, policy=Widths((3, 2, 1)), max_new_tokens=100)
        assert len(told) == 1
        plain = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, max_length=16)
        assert output.finish == ("context",)
        assert torch.equal(output.sequences, plain)

    def test_rows_of_a_batch_reach_it_apart(self) -> None:
        model = tiny_model("llama", VOCAB, max_position_embeddings=16)
        ids, mask = torch.tensor([[9, 9, 9, 7, 2], [3, 1, 4, 1, 5]]), torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
        with pytest.warns(UserWarning, match="cut short by the model's context of 16 tokens") as told:
            output = generate(ids, model, attention_mask=mask, drafter=NgramDrafter(), max_new_tokens=12)
        assert len(told) == 1
        assert output.finish == ("length", "context")
        assert output.statistics.new_tokens == 12 + 11

    def test_every_way_of_calling_says_once_that_it_cut_a_text(self) -> None:
        model, mask = tiny_model("llama", VOCAB, max_position_embeddings=16), torch.ones_like(PROMPT)
        with pytest.warns(UserWarning, match="cut short by the model's context of 16 tokens") as told:
            plain = model.generate(PROMPT, attention_mask=mask, custom_generate=polydraft.generate, max_new_tokens=40)
            long = generate(model=model, max_length=500)
            run = polydraft.stream(model, PROMPT, max_new_tokens=40).exhaust()
            many = polydraft.generate_many(model, [PROMPT[0], PROMPT[0]], max_new_tokens=40, temperature=0)
            texts = [*many]
        assert len(told) == 4 and [*run] == [*many] == []
        assert isinstance(plain, Tensor) and torch.equal(plain, long.sequences)
        assert {one.finish for one in texts} == {*run.finish} == {*long.finish} == {"context"}

    def test_nothing_is_said_of_a_text_that_ends_before(self) -> None:
        model = tiny_model("llama", VOCAB, max_position_embeddings=16)
        end = int(generate(model=model, max_new_tokens=4).sequences[0, -1])
        assert generate(model=model, max_new_tokens=500, eos_token_id=end).finish == ("eos",)
        assert generate(model=model, max_new_tokens=11).finish == ("length",)


class TestLogits:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("temperature", [0, 1.0])
    def test_a_target_without_usable_logits(self, value: float, temperature: float) -> None:
        with pytest.raises(InvalidProbabilities, match="The model's logits are not usable"):
            generate(model=broken(target(), value), temperature=temperature)

    def test_a_processor_that_forbids_everything(self) -> None:
        class Nothing(LogitsProcessor):
            def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                return torch.full_like(scores, -torch.inf)

        with pytest.raises(InvalidProbabilities, match="-inf"):
            generate(logits_processor=LogitsProcessorList([Nothing()]))

    def test_draft_logits_of_nan_fall_back_to_plain_decoding(self) -> None:
        draft = ModelDrafter(HuggingFaceModel(broken(target())))
        with pytest.warns(RuntimeWarning, match="The model drafter failed.*InvalidProbabilities"):
            output = generate(drafter=draft)
        assert torch.equal(output.sequences, generate().sequences)
        assert output.statistics.fallback.startswith("InvalidProbabilities: ")


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"temperature": -0.5}, "temperature must be .*-0.5"),
            ({"temperature": float("nan")}, "temperature must be .*nan"),
            ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be in \(0, 1\], but is 0.0"),
            ({"temperature": 1.0, "top_p": 1.5}, "top_p must be .*1.5"),
            ({"temperature": 1.0, "top_k": -1}, "top_k must be .*-1"),
            ({"temperature": 1.0, "min_p": 2.0}, "min_p must be .*2.0"),
            ({"temperature": 1.0, "typical_p": 0.0}, "typical_p must be .*0.0"),
        ],
    )
    def test_out_of_range(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(InvalidParameter, match=text):
            generate(drafter=good_drafter(), **options)

    @pytest.mark.parametrize(
        ("drafter", "rule"),
        [(NgramDrafter(), NaiveMatch()), (NgramDrafter(), RecursiveRejection()), (None, NaiveMatch(Given()))],
    )
    def test_a_verifier_of_another_scheme(self, drafter: Drafter | None, rule: Any) -> None:
        with pytest.raises(UnpairedScheme, match="works with drafts that are"):
            generate(drafter=drafter or good_drafter(), verifier=TopDown(rule))

    def test_a_tree_for_a_verifier_of_chains(self) -> None:
        with pytest.raises(UnpairedScheme, match="verifies one draft per node, but the tree has 2"):
            generate(drafter=good_drafter(), verifier=TopDown(SpeculativeSampling()), policy=Widths((2, 1)))

    def test_a_draft_model_with_another_vocabulary(self) -> None:
        with pytest.raises(VocabularyMismatch, match="The target has 24 tokens and the draft model 2000"):
            generate(drafter=tiny_model("llama", 2000))

    def test_every_error_is_polydrafts_own(self) -> None:
        for kind in (InvalidParameter, InvalidProbabilities, UnpairedScheme):
            assert issubclass(kind, PolydraftError)
            assert issubclass(kind, ValueError)


@dataclass
class Failing(Drafter):
    """A drafter that works until a verb is called for the given time, and then raises."""

    verb: str
    after: int = 0
    error: type[BaseException] = RuntimeError
    inner: Drafter = field(default_factory=good_drafter)
    calls: dict[str, int] = field(default_factory=dict)
    name = "failing"

    def check(self, scheme: Scheme) -> None:
        self.inner.check(scheme)

    def start(self, text: Text, session: Session) -> Any:
        self._count("start")
        return self.inner.start(text, session)

    def read(self, state: Any, text: Text, features: Features | None) -> Any:
        self._count("read")
        return self.inner.read(state, text, features)

    def draft(self, state: Any, request: DraftRequest) -> tuple[Draft | Pieces, Any]:
        self._count("draft")
        return self.inner.draft(state, request)

    def commit(self, state: Any, step: Step) -> Any:
        self._count("commit")
        return self.inner.commit(state, step)

    def _count(self, verb: str) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        if verb == self.verb and self.calls[verb] > self.after:
            raise self.error("out of pencils")


class TestDraftersThatRaise:
    @pytest.mark.parametrize(
        ("verb", "after"), [("start", 0), ("read", 0), ("draft", 0), ("draft", 2), ("commit", 0), ("commit", 2)]
    )
    def test_the_rest_is_decoded_plainly(self, verb: str, after: int) -> None:
        drafter = Failing(verb, after)
        with pytest.warns(RuntimeWarning) as caught:
            output = generate(drafter=drafter, policy=Chain(2))
        reason = "RuntimeError: out of pencils"
        assert [str(one.message) for one in caught] == [
            f"The failing drafter failed ({reason}); the rest is decoded without drafts."
        ]
        assert output.statistics.fallback == reason
        assert torch.equal(output.sequences, generate().sequences)
        assert drafter.calls[verb] == after + 1  # it is not asked again
        assert (output.statistics.drafted > 0) == (after > 0 or verb == "commit")

    def test_a_drafter_that_works_leaves_no_reason(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert generate(drafter=Failing("draft", after=1000)).statistics.fallback == ""


class TestInterruption:
    @pytest.mark.parametrize("verb", ["draft", "commit"])
    def test_what_was_generated_is_kept(self, verb: str) -> None:
        drafter = Failing(verb, after=3, error=KeyboardInterrupt)
        run = polydraft.stream(target(), PROMPT, drafter=drafter, policy=Chain(1), temperature=0, max_new_tokens=NEW)
        with pytest.raises(KeyboardInterrupt):
            run.exhaust()
        assert run.statistics.steps == 3
        assert 3 <= run.statistics.new_tokens == len(run.new_tokens[0]) < NEW
        plain = generate().sequences[0, PROMPT.shape[1] :].tolist()
        assert run.new_tokens[0] == plain[: len(run.new_tokens[0])]
        assert run.sequences(PROMPT, 0)[0].tolist() == PROMPT[0].tolist() + run.new_tokens[0]
        assert run.finish == [""]
        assert run.statistics.seconds["total"] > 0
        assert run.statistics.fallback == ""

    def test_stopping_early_on_ones_own_account(self) -> None:
        run = polydraft.stream(target(), PROMPT, drafter=good_drafter(), temperature=0, max_new_tokens=NEW)
        blocks: Iterator[Any] = iter(run)
        first = next(blocks)
        assert run.new_tokens == [list(first.rows[0].tokens)]
        run.exhaust()
        assert run.new_tokens[0] == generate().sequences[0, PROMPT.shape[1] :].tolist()
        assert run.finish == ["length"]
