"""Wrong values of every type get a result or one sentence; and texts that are no trees, a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydraft.catalogue import parse_policy
from polydraft.errors import InvalidParameter
from polydraft.trees import Chain, TreePolicy, TreeShape, Widths

HERE = Path(__file__).parent


def test_no_public_call_raises_a_raw_error() -> None:
    """In a process of its own: the type checker around the package would refuse most values before it sees them."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    found = subprocess.run(
        [sys.executable, str(HERE / "wrong_values.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = found.stdout.splitlines()
    assert found.returncode == 0, "\n".join(said[:20]) + found.stderr[-2000:]
    assert int(said[0].removesuffix(" calls")) > 4000 and said[1:] == []


WORDS = ["chain", "trunk", "best-first", "eagle", "eagle-2", "medusa", "confident", "confident-path", "adaptive"]
SIGNS = [":", "x", ",", "+", "-", " ", "_", "\n", ""]
DIGITS = ["0", "1", "2", "3", "4,2", "1.5", "nan", "inf", "1e999", "99999999999999999999", "\u0663"]
PIECES = st.sampled_from([*WORDS, *SIGNS, *DIGITS])


@settings(max_examples=400)
@given(text=st.text() | st.lists(PIECES, max_size=7).map("".join))
def test_any_text_is_a_tree_or_gets_a_sentence(text: str) -> None:
    try:
        policy = parse_policy(text)
    except InvalidParameter as error:
        assert str(error).endswith(".")
    else:
        assert isinstance(policy, TreePolicy) and 1 < policy.shape.size <= 2 * 4096


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chain:0", "length of a tree must be an integer of at least 1, but is 0"),
        ("trunk:99999999999+2", "The chain of 99999999999 drafts has over"),
        ("confident:8:nan", "threshold must be a number in 0 to 1, but is nan"),
        ("4,0", "Widths of a tree must be integers of at least 1, such as .*, but are"),
        ("9" * 5000, "A tree is written as children per depth"),
    ],
)
def test_what_is_wrong_with_a_text(text: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        parse_policy(text)


def test_what_is_wrong_is_said_when_the_object_is_built() -> None:
    with pytest.raises(InvalidParameter, match="length of a tree must be an integer of at least 1, but is 0"):
        Chain(0)
    with pytest.raises(InvalidParameter, match="integers of at least 1"):
        Widths((2, 0))
    with pytest.raises(InvalidParameter, match="has counts"):
        TreeShape(((-1,),))
