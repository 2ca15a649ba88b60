import pytest

from polydraft.training.corpus import SourceFile, capped, deduplicated, is_held_out, is_permissive


@pytest.mark.parametrize("licence", ["MIT", "BSD-3-Clause", "Apache 2.0", "PSF-2.0", "License :: OSI Approved :: ISC"])
def test_permissive_licences_are_taken(licence: str) -> None:
    assert is_permissive(licence)


@pytest.mark.parametrize(
    "licence", ["", "GPL-3.0", "MIT AND GPL-2.0-only", "MPL-2.0", "LGPLv3", "Proprietary", "UNKNOWN"]
)
def test_others_are_not(licence: str) -> None:
    assert not is_permissive(licence)


def file(name: str, text: str, package: str = "p") -> SourceFile:
    return SourceFile(package, "MIT", name, text)


def test_a_file_of_mostly_seen_lines_is_dropped_and_new_lines_are_kept() -> None:
    first = "\n".join(f"value_{i} = compute_something({i})" for i in range(10))
    half_new = first + "\n" + "\n".join(f"other_{i} = compute_something_else({i})" for i in range(11))
    kept = list(deduplicated([file("a", first), file("b", first), file("c", half_new)]))
    assert [one.name for one in kept] == ["a", "c"]


def test_a_package_stops_giving_at_its_share() -> None:
    kept = list(capped([file("a", "x" * 60), file("b", "x" * 60), file("c", "x" * 60, package="q")], 100))
    assert [(one.package, one.name) for one in kept] == [("p", "a"), ("q", "c")]


def test_the_split_depends_on_the_name_alone_and_holds_out_about_its_share() -> None:
    names = [file(f"module_{i}.py", "") for i in range(4000)]
    held = [is_held_out(one, share=0.1) for one in names]
    assert held == [is_held_out(file(one.name, "other text"), share=0.1) for one in names]
    assert 300 < sum(held) < 500  # 400 expected, standard deviation 19
