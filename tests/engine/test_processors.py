"""Logits processors that keep state between calls: the text is Hugging Face's, with drafts where copies can be had."""

import inspect
import threading
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from doubles import perturbed, tiny_model
from scipy.stats import chi2
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

import polydraft
from polydraft import EAGLE_25, Chain, Fixed, GenerationOutput, Widths
from polydraft.errors import InvalidParameter
from polydraft.models.generation.processor_trial import Behaviour, behaviour, traces
from polydraft.models.generation.processors import STATEFUL, STATELESS, UNSUITED, Forked, Serial, Stateless, kind_of

VOCAB, NEW = 60, 20
PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
FALSE_ALARM_RATE = 1e-6


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", VOCAB)


@cache
def draft() -> PreTrainedModel:
    return perturbed(target(), 0.03)


def both(rows: int, options: Callable[[], dict[str, Any]], **more: Any) -> tuple[Tensor, GenerationOutput]:
    """Return Hugging Face's greedy text and ours; options are made anew for each, since they may keep state."""
    ids, usual = PROMPTS[:rows], {"max_new_tokens": NEW, **more}
    plain = target().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **usual, **options())
    settings = {"drafter": draft(), "policy": Fixed(EAGLE_25), "temperature": 0, **usual}
    return plain, polydraft.generate(target(), ids, **settings, **options())


# --- Stand-ins -------------------------------------------------------------------------------------------------------


class Counting(LogitsProcessor):
    """Prefers another token at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 7 * self.calls % VOCAB] += 4
        return scores


class Uncopied(Counting):
    """The same, with something in it that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Forking(Uncopied):
    """The same, which knows how to copy itself."""

    def fork(self) -> "Forking":
        twin = Forking()
        twin.calls = self.calls
        return twin


class Declared(LogitsProcessor):
    """Cannot be copied, and says that it need not be."""

    stateless = True

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(-1, input_ids[:, -1:], -torch.inf)


class Pure(LogitsProcessor):
    """Says nothing of itself, and keeps nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(-1, input_ids[:, -2:], -torch.inf)


class Biased(LogitsProcessor):
    """Adds a row that it holds."""

    def __init__(self) -> None:
        self.bias = torch.linspace(-1, 1, VOCAB)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


class Sinking(Biased):
    """Changes the row that it holds in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.bias.mul_(0.9)
        return scores + self.bias


class LateCounting(Counting):
    """Counts its calls, to show it after a hundred: answers alone would not give it away."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.clone().index_fill_(-1, torch.tensor([5]), 9.0 if self.calls > 100 else 0.0)


class MixingRows(LogitsProcessor):
    """Adds what stands in the other rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + scores.sum(dim=0, keepdim=True)


class Shaken(LogitsProcessor):
    """Draws from torch's global random numbers."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand(scores.shape)


def counting_function() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        scores = scores.clone()
        scores[:, 7 * calls % VOCAB] += 4
        return scores

    return processor


class Grammar(LogitsProcessor):
    """A grammar's processor with the calls of xgrammar's: matchers made at the first call for its number of rows,

    a token that the grammar forbids is an error, scores are masked in place and in single precision, and the compiled
    grammar cannot be copied. The grammar: every token is at most 9 more or less than the last, round the vocabulary.
    """

    def __init__(self) -> None:
        self.compiled = threading.Lock()
        self.matchers: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        if not self.matchers:
            self.matchers = [int(row[-1]) for row in input_ids]
        elif len(input_ids) != len(self.matchers):
            raise RuntimeError("the number of rows is another than at the first call")
        else:
            for place, row in enumerate(input_ids):
                self.accept(place, int(row[-1]))
        for place, last in enumerate(self.matchers):
            scores[place, [token for token in range(VOCAB) if not allowed(last, token)]] = -torch.inf
        return scores

    def accept(self, place: int, token: int) -> None:
        assert allowed(self.matchers[place], token), "the grammar does not accept this token"
        self.matchers[place] = token


class ForkedGrammar(Grammar):
    """The same with a method to fork it."""

    def fork(self) -> "ForkedGrammar":
        twin = ForkedGrammar()
        twin.matchers = [*self.matchers]
        return twin


def allowed(last: int, token: int) -> bool:
    return (token - last + 9) % VOCAB <= 18


# --- The text is Hugging Face's --------------------------------------------------------------------------------------


def listed(kind: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"logits_processor": LogitsProcessorList([kind()])}


def prefix(row: int, text: Tensor) -> list[int]:
    return [(7 * int(text[-1]) + row) % VOCAB, (3 * int(text[-1]) + 1 + row) % VOCAB, 2 * row]


NEGATIVE = torch.tensor([[1, 2, 3], [4, 5, 6]])
SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836])
FORKED: dict[str, Callable[[], dict[str, Any]]] = {
    "guidance": lambda: {"guidance_scale": 1.7},
    "guidance away from a prompt": lambda: {"guidance_scale": 1.7, "negative_prompt_ids": NEGATIVE},
    "SynthID": lambda: {"watermarking_config": SYNTHID},
    "counting": listed(Counting),
    "counting in a closure": listed(counting_function),
    "changing a tensor": listed(Sinking),
    "forking": listed(Forking),
    "a grammar that forks": listed(ForkedGrammar),
}
ROWWISE: dict[str, Callable[[], dict[str, Any]]] = {
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "watermark of itself": lambda: {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "allowed after a prefix": lambda: {"prefix_allowed_tokens_fn": prefix},
    "penalty on the prompt's tokens": lambda: {"encoder_repetition_penalty": 1.7},
    "no n-grams of the prompt": lambda: {"encoder_no_repeat_ngram_size": 2},
    "declared": listed(Declared),
    "pure": listed(Pure),
}


@pytest.mark.long(4)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", [*FORKED.values(), *ROWWISE.values()], ids=[*FORKED, *ROWWISE])
def test_the_greedy_text_is_hugging_faces_and_was_drafted(options: Callable[[], dict[str, Any]], rows: int) -> None:
    def of_rows() -> dict[str, Any]:
        given = options()
        return {name: one[:rows] if isinstance(one, Tensor) else one for name, one in given.items()}

    plain, output = both(rows, of_rows)
    assert torch.equal(output.sequences, plain)
    assert output.statistics.drafted > 0
    assert output.statistics.accepted > 0
    assert output.statistics.fallback == ""


@pytest.mark.parametrize("kind", [Uncopied, Grammar])
def test_what_cannot_be_copied_is_decoded_plainly_and_said(kind: Callable[[], Any]) -> None:
    with pytest.warns(RuntimeWarning, match=f"{kind.__name__} keeps state between calls and cannot be copied"):
        plain, output = both(1, listed(kind))
    assert torch.equal(output.sequences, plain)
    assert output.statistics.drafted == 0
    assert "without drafts" in output.statistics.fallback
    with pytest.raises(InvalidParameter, match=f"{kind.__name__} keeps state .* serves one row, but there are 2"):
        both(2, listed(kind))


@pytest.mark.long(1)
@pytest.mark.parametrize("policy", [Chain(2), Widths((2, 1))], ids=["chain", "tree"])
def test_sampled_text_follows_the_law_of_a_counting_processor(policy: Chain | Widths) -> None:
    """Chi-square on two tokens, rare pairs together: if the law is right, one choice of seeds in a million fails."""
    model, samples = tiny_model("llama", 6), 1000
    twin, prompt = perturbed(model, 0.05), torch.tensor([[2, 1, 5]])

    class Swinging(LogitsProcessor):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores * (0.4 if self.calls % 2 else 1.5)

    output = polydraft.generate(
        model, prompt, drafter=twin, policy=policy, temperature=1.0, top_k=0, seed=3, max_new_tokens=2,
        num_return_sequences=samples, logits_processor=[Swinging()],
    )  # fmt: skip
    with torch.no_grad():
        first = (0.4 * model(prompt).logits[0, -1]).softmax(dim=-1)
        texts = torch.cat([prompt.expand(6, -1), torch.arange(6).unsqueeze(-1)], dim=-1)
        joint = (first.unsqueeze(-1) * (1.5 * model(texts).logits[:, -1]).softmax(dim=-1)).flatten()
    counts = torch.bincount(6 * output.sequences[:, 3] + output.sequences[:, 4], minlength=36)
    common = samples * joint >= 5
    found = torch.cat([counts[common], counts[~common].sum().unsqueeze(0)])
    expected = samples * torch.cat([joint[common], joint[~common].sum().unsqueeze(0)])
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert float(chi2.sf(statistic, int(common.sum()))) > FALSE_ALARM_RATE
    assert output.statistics.accepted > 0


# --- What a trial must not be deceived by, nor change ----------------------------------------------------------------


def act(scores: Tensor, count: int) -> Tensor:
    scores = scores.clone()
    scores[:, 7 * int(count) % VOCAB] += 6
    return scores


class InItsClass(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        type(self).calls += 1
        return act(scores, type(self).calls)


class OfItsClass(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        type(self).calls += 1
        return scores.clone()


def in_a_default(input_ids: Tensor, scores: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006  that is the point
    calls[0] += 1
    return act(scores, calls[0])


def in_an_attribute(input_ids: Tensor, scores: Tensor) -> Tensor:
    in_an_attribute.calls += 1  # pyright: ignore
    return act(scores, in_an_attribute.calls)  # pyright: ignore


MODULE_CALLS = [0]


def in_the_module(input_ids: Tensor, scores: Tensor) -> Tensor:
    MODULE_CALLS[0] += 1
    return act(scores, MODULE_CALLS[0])


def in_two_closures() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return lambda input_ids, scores: act(scores, count())


class InAField(LogitsProcessor):
    def __init__(self) -> None:
        self.inner = counting_function()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.inner(input_ids, scores)


class NeverCopied(Counting):
    def __deepcopy__(self, memo: dict[int, Any]) -> "NeverCopied":
        return self


class OfNumbers(LogitsProcessor):
    def __init__(self) -> None:
        self.kept, self.last = np.zeros(1, int), deque([0], maxlen=3)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.kept += 1
        self.last.append(int(self.kept[0]))
        return act(scores, self.last[-1]) if self.kept[0] > 9 else scores


class Flagged(LogitsProcessor):
    """Turned on and off by a token, as thinking budgets are."""

    def __init__(self, token: int) -> None:
        self.token, self.on = token, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.on ^= int(input_ids[0, -1]) == self.token
        return act(scores, 3) if self.on else scores


def of_functions() -> list[Callable[[], Any]]:
    in_an_attribute.calls = 0  # pyright: ignore
    in_a_default.__defaults__[0][0] = MODULE_CALLS[0] = InItsClass.calls = OfItsClass.calls = 0  # pyright: ignore
    functions = [in_a_default, in_an_attribute, in_the_module]
    makers: list[Callable[[], Any]] = [lambda one=one: one for one in functions]
    makers += [in_two_closures, lambda: partial(counting_function()), InItsClass, OfItsClass, InAField, NeverCopied]
    return [*makers, OfNumbers, *(lambda token=token: Flagged(token) for token in (12, 20, 29, 5, 14))]


@pytest.mark.long(7)
@pytest.mark.filterwarnings("ignore:.*without drafts")
@pytest.mark.parametrize("place", range(15))
def test_state_kept_anywhere_gives_hugging_faces_text(place: int) -> None:
    options = listed(of_functions()[place])
    ids, usual = PROMPTS[:1], {"max_new_tokens": NEW}
    plain = target().generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **usual, **options())
    for policy in (Chain(3), Fixed(EAGLE_25)):
        made = of_functions()[place]()
        settings = {"drafter": draft(), "policy": policy, "temperature": 0, **usual}
        output = polydraft.generate(target(), ids, logits_processor=[made], **settings)
        assert torch.equal(output.sequences, plain)
    assert len(of_functions()) == 15


def test_global_random_numbers_are_left_alone_by_a_trial() -> None:
    def drawing(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.from_numpy(3 * np.random.randn(*scores.shape)).float()  # noqa: NPY002

    texts = []
    for ours in (False, True):
        np.random.seed(0)  # noqa: NPY002
        settings = {"max_new_tokens": NEW, "logits_processor": [drawing], "attention_mask": torch.ones(1, 5, dtype=int)}
        if ours:
            with pytest.warns(RuntimeWarning, match="without drafts"):
                texts.append(polydraft.generate(target(), PROMPTS[:1], temperature=0, **settings).sequences)
        else:
            texts.append(target().generate(PROMPTS[:1], do_sample=False, **settings))
    assert torch.equal(*texts)


def test_objects_that_two_processors_share_are_shared_by_their_copies() -> None:
    class Counts(LogitsProcessor):
        def __init__(self, shared: dict[str, int]) -> None:
            self.shared = shared

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.shared["calls"] += 1
            return scores

    class Reads(Counts):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return act(scores, self.shared["calls"])

    def options() -> dict[str, Any]:
        shared = {"calls": 0}
        return {"logits_processor": LogitsProcessorList([Counts(shared), Reads(shared)])}

    plain, output = both(1, options)
    assert torch.equal(output.sequences, plain)
    assert output.statistics.accepted > 0


def test_what_answers_by_the_rows_number_or_mixes_rows_is_refused_for_several() -> None:
    def by_number(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, row + 2] += 8
        return scores

    for kind in (lambda: by_number, MixingRows):
        plain, output = both(1, listed(kind))
        assert torch.equal(output.sequences, plain)
        with pytest.raises(InvalidParameter, match="by its number or by the rows beside it"):
            both(2, listed(kind))


def test_warpers_with_settings_of_their_own_keep_them() -> None:
    """A nucleus of .2 is one token here, but at least four are to be kept."""
    for warper in (
        logits_process.TopPLogitsWarper(0.2, min_tokens_to_keep=4),
        logits_process.TopKLogitsWarper(2, filter_value=-1.0),
        logits_process.MinPLogitsWarper(0.9, min_tokens_to_keep=4),
        logits_process.TypicalLogitsWarper(0.2, min_tokens_to_keep=4),
    ):
        with torch.no_grad():
            logits = target()(PROMPTS[:1]).logits[:, -1].float()
        law = warper(PROMPTS[:1], logits).softmax(dim=-1)[0]
        output = polydraft.generate(
            target(), PROMPTS[:1], drafter=draft(), do_sample=True, top_k=0, seed=1, max_new_tokens=1,
            num_return_sequences=400, logits_processor=[warper],
        )  # fmt: skip
        counts = torch.bincount(output.sequences[:, -1], minlength=VOCAB)
        assert not bool(counts[law == 0].any())
        assert float((counts / 400 - law).abs().sum() / 2) < 0.15
    output = polydraft.generate(
        target(), PROMPTS[:1], temperature=0, max_new_tokens=2, logits_processor=[logits_process.TopKLogitsWarper(2)],
        output_scores=True,
    )  # fmt: skip
    assert [int(one.isfinite().sum()) for one in output.scores] == [2, 2]


# --- Nothing of the user's is changed --------------------------------------------------------------------------------


def test_the_users_own_processor_stays_as_it_was() -> None:
    for own in (Counting(), Forking(), LateCounting()):
        for _ in range(2):
            polydraft.generate(
                target(), PROMPTS, drafter=draft(), temperature=0, max_new_tokens=5, logits_processor=[own]
            )
        assert own.calls == 0


def test_many_prompts_get_a_copy_each() -> None:
    alone = [both(2, listed(Counting))[0][row, 5:].tolist() for row in range(2)]
    run = polydraft.generate_many(
        target(), list(PROMPTS), drafter=draft(), batch_size=1, temperature=0, max_new_tokens=NEW,
        logits_processor=[Counting()],
    )  # fmt: skip
    assert [one.tokens for one in sorted(run, key=lambda one: one.name)] == alone
    with pytest.raises(InvalidParameter, match=r"Uncopied keeps state .* cannot run beside other texts"):
        polydraft.generate_many(target(), list(PROMPTS), max_new_tokens=3, logits_processor=[Uncopied()])


def test_a_processor_is_not_asked_beyond_an_end_of_text_or_a_forbidden_draft() -> None:
    """A grammar knows nothing of what follows a token that it forbids, or the end of the text."""
    plain, _ = both(1, listed(ForkedGrammar))
    end = int(plain[0, 12])

    class Strict(ForkedGrammar):
        def accept(self, place: int, token: int) -> None:
            assert self.matchers[place] != end or len(self.matchers) == 0, "the text has ended"
            super().accept(place, token)

        def fork(self) -> "Strict":
            twin = Strict()
            twin.matchers = [*self.matchers]
            return twin

    more = {"eos_token_id": end, "pad_token_id": 0}
    expected, output = both(1, listed(Strict), **more)
    assert torch.equal(output.sequences, expected)
    assert output.finish == ("eos",)


# --- What a processor is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Counting, Behaviour.forkable),
        (LateCounting, Behaviour.forkable),
        (counting_function, Behaviour.forkable),
        (Pure, Behaviour.stateless),
        (Biased, Behaviour.stateless),
        (Sinking, Behaviour.forkable),
        (lambda: lambda input_ids, scores: scores / 2, Behaviour.stateless),
        (Uncopied, Behaviour.serial),
        (MixingRows, Behaviour.mixing),
        (Shaken, Behaviour.serial),
    ],
)
def test_a_trial_tells_what_a_processor_is(kind: Callable[[], Any], expected: Behaviour) -> None:
    from polydraft.models.generation.processors import forked

    own = kind()
    before, random = traces(own), torch.get_rng_state()
    assert behaviour(own, forked, PROMPTS[:1], VOCAB) is expected
    assert traces(own) == before
    assert torch.equal(torch.get_rng_state(), random)


def own_processors() -> list[str]:
    classes = inspect.getmembers(logits_process, inspect.isclass)
    return [
        name.removesuffix("LogitsProcessor").removesuffix("LogitsWarper")
        for name, kind in classes
        if issubclass(kind, LogitsProcessor) and kind is not LogitsProcessor
    ]


def test_every_processor_of_hugging_faces_is_known() -> None:
    known = [*STATELESS, *STATEFUL, *UNSUITED, "PrefixConstrained"]
    assert sorted(own_processors()) == sorted(known)
    assert len(known) == len({*known})


MADE: dict[str, Callable[[], LogitsProcessor]] = {
    "MinLength": lambda: logits_process.MinLengthLogitsProcessor(9, 3),
    "MinNewTokensLength": lambda: logits_process.MinNewTokensLengthLogitsProcessor(5, 3, 3),
    "Temperature": lambda: logits_process.TemperatureLogitsWarper(0.7),
    "RepetitionPenalty": lambda: logits_process.RepetitionPenaltyLogitsProcessor(1.3),
    "EncoderRepetitionPenalty": lambda: logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.3, PROMPTS[:1]),
    "TopP": lambda: logits_process.TopPLogitsWarper(0.7),
    "TopK": lambda: logits_process.TopKLogitsWarper(7),
    "TopH": lambda: logits_process.TopHLogitsWarper(0.5),
    "MinP": lambda: logits_process.MinPLogitsWarper(0.1),
    "Typical": lambda: logits_process.TypicalLogitsWarper(0.7),
    "Epsilon": lambda: logits_process.EpsilonLogitsWarper(0.01),
    "Eta": lambda: logits_process.EtaLogitsWarper(0.01),
    "NoRepeatNGram": lambda: logits_process.NoRepeatNGramLogitsProcessor(2),
    "EncoderNoRepeatNGram": lambda: logits_process.EncoderNoRepeatNGramLogitsProcessor(2, PROMPTS[:1]),
    "SequenceBias": lambda: logits_process.SequenceBiasLogitsProcessor([[[3, 1], 2.0], [[7], -1.0]]),
    "NoBadWords": lambda: logits_process.NoBadWordsLogitsProcessor([[3], [1, 4]]),
    "ForcedBOSToken": lambda: logits_process.ForcedBOSTokenLogitsProcessor(3),
    "ForcedEOSToken": lambda: logits_process.ForcedEOSTokenLogitsProcessor(7, 3),
    "InfNanRemove": logits_process.InfNanRemoveLogitsProcessor,
    "ExponentialDecayLengthPenalty": lambda: logits_process.ExponentialDecayLengthPenalty((2, 1.1), 3, 5),
    "LogitNormalization": logits_process.LogitNormalization,
    "SuppressTokensAtBegin": lambda: logits_process.SuppressTokensAtBeginLogitsProcessor([3], 5),
    "SuppressTokens": lambda: logits_process.SuppressTokensLogitsProcessor([3]),
    "BarkEosPrioritizer": lambda: logits_process.BarkEosPrioritizerLogitsProcessor(3, 0.2),
    "WhisperTimeStamp": lambda: logits_process.WhisperTimeStampLogitsProcessor(
        GenerationConfig(no_timestamps_token_id=4, eos_token_id=2, max_initial_timestamp_index=3), begin_index=2
    ),
    "Watermark": lambda: logits_process.WatermarkLogitsProcessor(VOCAB, "cpu"),
}


@pytest.mark.parametrize("name", sorted(STATELESS))
def test_what_is_called_stateless_gives_the_same_answers_in_any_order(name: str) -> None:
    """Some keep what they have computed, which changes no answer: so their fields are not looked at here."""
    one, (numbers,) = MADE[name](), (torch.Generator().manual_seed(0),)
    texts = [torch.cat([PROMPTS[:1], torch.tensor([end])], dim=-1) for end in ([3], [3, 9], [3, 9, 1], [4])]
    scores = torch.randn(4, VOCAB, generator=numbers)
    answers = [one(text, row.clone().unsqueeze(0)) for text, row in zip(texts, scores, strict=True)]
    for place in (2, 0, 3, 1, 1, 0):
        torch.testing.assert_close(one(texts[place], scores[place : place + 1].clone()), answers[place])
    together = one(torch.cat([texts[0], texts[3]]), scores[[0, 3]].clone())
    torch.testing.assert_close(together, torch.cat([answers[0], answers[3]]))


def test_hugging_faces_classes_are_not_tried_but_derived_ones_are() -> None:
    class Derived(logits_process.TopKLogitsWarper):
        def __init__(self) -> None:
            super().__init__(3)
            self.calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return super().__call__(input_ids, scores) * (1 + self.calls % 3)

    assert kind_of(logits_process.TopKLogitsWarper(3), PROMPTS[:1], VOCAB) is Stateless
    assert kind_of(Derived(), PROMPTS[:1], VOCAB) is Forked
    assert kind_of(Uncopied(), PROMPTS[:1], VOCAB) is Serial
    guided = logits_process.ClassifierFreeGuidanceLogitsProcessor(2.0)
    with pytest.raises(InvalidParameter, match="ClassifierFreeGuidanceLogitsProcessor is refused"):
        polydraft.generate(target(), PROMPTS, max_new_tokens=3, logits_processor=[guided])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda scores: None, "but returned NoneType"),
        (lambda scores: scores[:, :3], r"but returned scores of shape \(1, 3\)"),
        (lambda scores: scores.to(torch.complex64), "of complex numbers"),
        (lambda scores: scores.tolist(), "but returned list"),
    ],
)
def test_a_processor_that_returns_no_scores_is_named(answer: Callable[[Tensor], object], said: str) -> None:
    class Odd(Declared):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return answer(scores)

    with pytest.raises(InvalidParameter, match=f"The logits processor Odd must return .*{said}"):
        polydraft.generate(target(), PROMPTS[:1], drafter="none", max_new_tokens=3, logits_processor=[Odd()])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda scores: None, r"The logits processor Odd must return scores of shape \(1, 60\), but returned NoneType"),
        (lambda scores: {}["mine"], "The logits processor Odd failed: 'mine'"),
        (lambda scores: next(iter(())), "The logits processor Odd failed: no reason is given .StopIteration"),
    ],
)
def test_with_several_rows_a_processors_own_error_is_the_reason(answer: Callable[[Tensor], object], said: str) -> None:
    class Odd(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return answer(scores)

    with pytest.raises(InvalidParameter, match=said) as refusal:
        polydraft.generate(target(), PROMPTS, max_new_tokens=3, logits_processor=[Odd()])
    assert "keeps state" not in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_processor_may_answer_in_another_precision(dtype: torch.dtype) -> None:
    class Converting(Declared):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.to(dtype)

    plain, output = both(2, listed(Converting))
    assert torch.equal(output.sequences, plain)


@pytest.mark.grammars
class TestRealGrammars:
    """xgrammar's and outlines' own processors: `make test-grammars` installs them."""

    @pytest.mark.parametrize("rows", [1, 2])
    def test_xgrammar(self, rows: int) -> None:
        from doubles import tiny_tokenizer

        xgrammar = pytest.importorskip("xgrammar")
        from xgrammar.contrib.hf import LogitsProcessor as Own

        tokenizer = tiny_tokenizer()
        model = tiny_model("llama", len(tokenizer))
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        compiled = xgrammar.GrammarCompiler(info).compile_regex("[a-z]{3}(,[0-9]{2}){1,20}")
        ids = torch.tensor([tokenizer("a b").input_ids] * rows)
        usual = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "eos_token_id": 0, "pad_token_id": 0}
        plain = model.generate(ids, do_sample=False, logits_processor=[Own(compiled)], **usual)
        settings = {"drafter": perturbed(model, 0.03), "policy": Fixed(EAGLE_25), "temperature": 0, **usual}
        output = polydraft.generate(model, ids, logits_processor=[Own(compiled)], **settings)
        assert torch.equal(output.sequences, plain)
        assert output.statistics.drafted > 0

    @pytest.mark.parametrize("rows", [1, 2])
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("backend", ["outlines_core", "llguidance", "xgrammar"])
    def test_outlines(self, backend: str, rows: int) -> None:
        from doubles import tiny_tokenizer

        pytest.importorskip("outlines")
        tokenizer = tiny_tokenizer()
        model = tiny_model("llama", len(tokenizer))
        ids = torch.tensor([tokenizer("a b").input_ids] * rows)
        usual = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "eos_token_id": 0, "pad_token_id": 0}
        own = outlines_processor(backend, tokenizer, "[a-z]{3}(,[0-9]{2}){1,20}")
        plain = model.generate(ids, do_sample=False, logits_processor=[own()], **usual)
        settings = {"drafter": perturbed(model, 0.03), "policy": Fixed(EAGLE_25), "temperature": 0, **usual}
        output = polydraft.generate(model, ids, logits_processor=[own()], **settings)
        assert torch.equal(output.sequences, plain)
        assert output.statistics.drafted > 0 and not output.statistics.fallback


def outlines_processor(backend: str, tokenizer: Any, pattern: str) -> Callable[[], Any]:
    """Return what makes a processor of one of outlines' kinds."""
    if backend == "outlines_core":
        core = pytest.importorskip("outlines_core")
        from outlines.backends.outlines_core import OutlinesCoreLogitsProcessor

        spelt = {tokenizer.convert_tokens_to_string([one]): [place] for one, place in tokenizer.get_vocab().items()}
        spelt.pop("<end>")
        index = core.Index(pattern, core.Vocabulary(0, spelt))
        return lambda: OutlinesCoreLogitsProcessor(index, "torch")
    if backend == "llguidance":
        library = pytest.importorskip("llguidance")
        from llguidance.hf import from_tokenizer
        from outlines.backends.llguidance import LLGuidanceLogitsProcessor

        tokens = from_tokenizer(tokenizer)
        return lambda: LLGuidanceLogitsProcessor(library.grammar_from("regex", pattern), tokens, "torch")
    xgrammar = pytest.importorskip("xgrammar")
    from outlines.backends.xgrammar import XGrammarLogitsProcessor

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiled = xgrammar.GrammarCompiler(info).compile_regex(pattern)
    return lambda: XGrammarLogitsProcessor(compiled, "torch")
