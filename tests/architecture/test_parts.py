"""Each test belongs to a part, and what the lists of parts name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.parts import BOTH, LONGEST, REST, Part, may_have_some_of, parts_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", [*BOTH, *LONGEST, *(name for names in REST.values() for name in names)])
def test_every_listed_test_exists(name: str) -> None:
    """A renamed test would silently move to another part."""
    path, _, test = name.partition("::")
    assert (ROOT / path).exists()
    assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


def test_a_name_covers_its_contents_and_no_longer_names() -> None:
    """A folder, a file and a test can be named; a longer name is a different one."""
    for inside in ("tests/attack/test_wire.py", "tests/attack/chaos/test_chaos.py::test_x[1]", "tests/attack"):
        assert parts_of(inside) == {Part.REST}
    page = "tests/integration/test_documentation.py::test_the_examples_of_a_page_behave_as_shown"
    assert [parts_of(page), parts_of(f"{page}[README.md]")] == [{Part.REST}] * 2
    assert [parts_of(f"{page}_too"), parts_of("tests/attack_more/test_x.py")] == [{Part.QUICK}] * 2
    assert parts_of(f"{BOTH[0]}[memory]") == set(Part)


def test_a_file_with_tests_of_both_parts_is_collected_for_both() -> None:
    """A file of one part is collected for that part only."""
    names = ("integration/test_messages", "contract/test_run_store", "unit/test_x", "attack/test_x")
    mixed, mixed_by_examples, quick, rest = (f"tests/{name}.py" for name in names)
    for each in (mixed, mixed_by_examples):
        assert [may_have_some_of(each, part) for part in Part] == [True, True]
    assert [may_have_some_of(quick, part) for part in Part] == [True, False]
    assert [may_have_some_of(rest, part) for part in Part] == [False, True]
