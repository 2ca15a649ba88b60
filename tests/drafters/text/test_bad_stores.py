"""What is no store, no path of one, or no setting of one, is refused in a sentence of ours that names it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import tiny_model

import polydraft
from polydraft.drafters import RetrievalDrafter, StoreVocabulary, StoreWriter, SuffixDrafter, SuffixStore, TextStore
from polydraft.errors import InvalidParameter, StoreError, shown

NO_PATHS = (None, 3, b"x", [], True, 1.5)
OPENERS: tuple[Callable[[Any], Any], ...] = (
    TextStore,
    SuffixStore,
    lambda path: StoreWriter(path, StoreVocabulary(20)),
)


@pytest.mark.wrong_types
@pytest.mark.parametrize("made", OPENERS)
@pytest.mark.parametrize("path", NO_PATHS, ids=repr)
def test_what_is_no_path_is_named(made: Callable[[Any], Any], path: object) -> None:
    with pytest.raises(
        InvalidParameter, match=f"must be the path of a store of texts, but is {re.escape(shown(path))}"
    ):
        made(path)


@pytest.mark.parametrize(
    "made", [*OPENERS, lambda path: SuffixDrafter(store=path), lambda path: RetrievalDrafter(store=path)]
)
@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x"])
def test_a_path_that_no_file_can_have_is_named(made: Callable[[Any], Any], path: str) -> None:
    with pytest.raises(StoreError, match=r"There is no store of texts at .*(no file has such a name|home directory)"):
        made(path)


@pytest.mark.parametrize("word", ["rest:\0", "suffix:\0", "rest:", "rest:~nobody-of-this-name", "rest:/etc/passwd"])
def test_words_with_an_odd_path(word: str) -> None:
    with pytest.raises(polydraft.PolydraftError) as said:
        polydraft.generate(tiny_model(), torch.tensor([[1, 2, 3]]), drafter=word, max_new_tokens=2)
    assert "\n" not in str(said.value)


def test_a_folder_of_something_else_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("Dear reader")
    for word in (f"rest:{tmp_path}", f"suffix:{tmp_path}"):
        with pytest.raises(StoreError, match=r"letter\.txt"):
            polydraft.generate(tiny_model(), torch.tensor([[1, 2, 3]]), drafter=word, max_new_tokens=2)


@pytest.mark.wrong_types
@pytest.mark.parametrize("value", [-1, 0, True, 1.5, "3"], ids=repr)
@pytest.mark.parametrize("name", ["most_bytes", "chunk"])
def test_settings_of_a_writer(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=f"{name} must be a whole number of at least 1, but is {shown(value)}"):
        StoreWriter(tmp_path / "new", StoreVocabulary(20), **{name: value})  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.wrong_types
def test_other_settings_of_a_writer(tmp_path: Path) -> None:
    wrong: Any = 1
    with pytest.raises(InvalidParameter, match="merges must be True or False, but is 1"):
        StoreWriter(tmp_path / "new", StoreVocabulary(20), merges=wrong)
    with pytest.raises(InvalidParameter, match="vocabulary must be a Vocabulary, but is 1"):
        StoreWriter(tmp_path / "new", wrong)
    for size in (-1, None, True, 1.5, "3"):
        with pytest.raises(InvalidParameter, match="The size of a vocabulary must be a whole number"):
            StoreVocabulary(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", [3, "name", [], True], ids=repr)
def test_what_is_no_tokenizer_makes_no_prediction(tokenizer: object) -> None:
    given: dict[str, Any] = {"prediction": "a text", "tokenizer": tokenizer, "max_new_tokens": 2}
    for call in (polydraft.generate, polydraft.stream):
        with pytest.raises(InvalidParameter, match=f"tokenizer must be .*, but is {re.escape(shown(tokenizer))}"):
            call(tiny_model(), torch.tensor([[1, 2, 3]]), **given)
