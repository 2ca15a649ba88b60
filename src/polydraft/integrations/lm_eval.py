"""A model of lm-eval that writes with drafts: `python -m polydraft.integrations.lm_eval run --model polydraft ...`.

lm-eval finds models of other packages only where they were imported before; run as a module, this file is its command
with one model more. In Python, importing it is enough: `lm_eval.simple_evaluate(model="polydraft", ...)`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polydraft.drafters import Drafter, NoDraft
from polydraft.engine import Statistics, generate, summed
from polydraft.engine.choices import chosen_drafter, chosen_policy, chosen_verifier
from polydraft.errors import MissingExtra
from polydraft.models import HuggingFaceModel

try:
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtra(
        f'The lm-eval model needs lm-eval and what its model `hf` needs ({error}): pip install "lm_eval[hf]>=0.4.13".'
    ) from error


class StopsOfRow:
    """Ends a row where a stop string stands in its new text, as lm-eval's criterion does for all rows together.

    That one ends a batch when every row has had its string. The text is the same, since lm-eval cuts it at the first
    string, but rows would wait for each other at every token.

    Args:
        tokenizer: spells the tokens.
        strings: the stop strings.
        begin: how many tokens of a row are its prompt, padding included.
    """

    stateless = True

    def __init__(self, tokenizer: Any, strings: Sequence[str], begin: int) -> None:
        self._tokenizer, self._strings, self._begin = tokenizer, [one for one in strings if one], begin
        lengths = [len(tokenizer.encode(one, add_special_tokens=False)) for one in self._strings]
        self._window = 2 + max(lengths, default=0)  # a text may spell a string in more tokens, as lm-eval says

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> bool:
        """Return whether the only row is to end here."""
        (text,) = self._tokenizer.batch_decode(input_ids[:, self._begin :][:, -self._window :])
        return any(one in text for one in self._strings)


@register_model("polydraft")
class PolydraftLM(HFLM):
    """lm-eval's model `hf`, with texts by `polydraft.generate`.

    Log-likelihoods are the model's own, by lm-eval's passes: only `generate_until` drafts. Greedy texts are those of
    `hf`, and sampled ones have its law, unless `verifier` is lossy. Sampled texts follow from torch's global random
    state, which lm-eval seeds. `results["config"]["polydraft"]` says how many tokens a pass of the model brought.

    Args:
        pretrained: the model, as for `hf`.
        drafter: a drafter, or a draft model, its folder or hub name, or a word, as for `polydraft.generate`.
        verifier: the rule that keeps drafts, or its word.
        policy: the tree; text with commas in it needs the JSON form of --model_args.
        **harness: arguments of `hf`: dtype, device, batch_size, peft and the like.

    Raises:
        PolydraftError: a drafter, rule or tree that means nothing or does not suit the model, in words of its own.
    """

    def __init__(
        self,
        pretrained: Any,
        drafter: Drafter | nn.Module | str | Path | None = None,
        verifier: Any = None,
        policy: Any = None,
        **harness: Any,
    ) -> None:
        super().__init__(pretrained, **harness)
        given = None if drafter is None else chosen_drafter(drafter, HuggingFaceModel(self.model))
        chosen_policy(policy)  # what is no policy or rule is said before texts are asked for
        chosen_verifier(verifier, given or NoDraft())
        self._drafts = {"drafter": given, "verifier": verifier, "policy": policy}
        self.statistics = Statistics()

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Return prompts and texts, as lm-eval's `generate_until` asks for them."""

        def decoded(
            model: nn.Module, input_ids: Tensor, *, stopping_criteria: Any, inputs_tensor: Any = None, **prepared: Any
        ) -> Tensor:
            stopping_criteria.append(StopsOfRow(self.tokenizer, stop, input_ids.shape[1]))
            prepared["generation_config"].return_dict_in_generate = True  # a copy, made for this call
            read = {"stopping_criteria": stopping_criteria, "inputs_tensor": inputs_tensor}
            output: Any = generate(model, input_ids, **read, **self._drafts, **prepared)
            self.statistics = summed([self.statistics, output.statistics])
            return output.sequences

        return super()._model_generate(context, max_length, [], custom_generate=decoded, **options)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes about a model beside its scores, with `polydraft`, the statistics of all texts."""
        return {**super().get_model_info(), "polydraft": self.statistics.as_dict()}


if __name__ == "__main__":
    cli_evaluate()
