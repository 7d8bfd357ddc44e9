"""Each test belongs to one of the two parts, and what is left out of the quick one is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parts import REST, Part, may_have_some_of, part_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [name for names in REST.values() for name in names])
def test_what_the_rest_names_exists(name: str) -> None:
    """A test that was renamed would silently change its part."""
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def test_a_name_covers_what_is_in_it_and_nothing_beside_it() -> None:
    """A folder, a file and a test are named; a longer name is another one."""
    for inside in ("tests/attack/test_wire.py", "tests/attack/chaos/test_chaos.py::test_x[1]", "tests/attack"):
        assert part_of(inside) is Part.REST
    page = "tests/integration/test_documentation.py::test_what_a_page_shows_is_what_happens"
    assert [part_of(page), part_of(f"{page}[README.md]"), part_of(f"{page}_too")] == [Part.REST, Part.REST, Part.QUICK]
    assert part_of("tests/attack_more/test_x.py") is Part.QUICK


def test_a_file_with_tests_of_both_parts_is_read_for_both() -> None:
    """A file of one part is read for that part alone."""
    mixed, quick, rest = (f"tests/{name}.py" for name in ("integration/test_messages", "unit/test_x", "attack/test_x"))
    assert [may_have_some_of(mixed, part) for part in Part] == [True, True]
    assert [may_have_some_of(quick, part) for part in Part] == [True, False]
    assert [may_have_some_of(rest, part) for part in Part] == [False, True]
