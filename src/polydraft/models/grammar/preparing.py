"""What a call says of a grammar, as a logits processor."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from polydraft.errors import InvalidParameter, shown
from polydraft.models.grammar.grammar import Grammar
from polydraft.models.grammar.masks import GrammarLogitsProcessor
from polydraft.models.grammar.vocabulary import fitting_tokenizer, vocabulary_of


def grammar_processor(options: Mapping[str, Any], model: PreTrainedModel) -> GrammarLogitsProcessor | None:
    """Return the processor of a call's grammar; None if it has none.

    Args:
        options: the call's arguments; of these `grammar` and `tokenizer`.
        model: the target.

    Raises:
        InvalidParameter: it is no grammar, allows nothing, or there is no tokenizer for it.
        MissingExtra: llguidance is not installed.
        VocabularyMismatch: the tokenizer is another model's.
    """
    grammar = options.get("grammar")
    if grammar is None:
        return None
    if not isinstance(grammar, Grammar):
        raise InvalidParameter(
            f"grammar must be a Grammar such as Grammar.regex('[0-9]+') or Grammar.json_object(), but is "
            f"{shown(grammar)}."
        )
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    tokenizer = fitting_tokenizer(options.get("tokenizer"), model, size)
    vocabulary = vocabulary_of(tokenizer, size)
    return GrammarLogitsProcessor(vocabulary.start(grammar), vocabulary)
