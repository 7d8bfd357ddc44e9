"""YAML is read as version 1.2 says, with positions, and no file can harm the reader."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmedic_core import yaml_text
from trainmedic_core.problems import FileProblem
from trainmedic_core.yaml_text import TextPosition


def test_plain_words_that_older_yaml_read_as_something_else_stay_text() -> None:
    """``on``, ``yes``, dates and sexagesimal times are text in the YAML 1.2 core schema."""
    (document,), problems = yaml_text.read("on: yes\nday: 2026-01-01\ntime: 12:30:00\noctal: 010\n", "f")
    assert problems == []
    assert document.value == {"on": "yes", "day": "2026-01-01", "time": "12:30:00", "octal": 10}


@pytest.mark.parametrize(
    ("text", "value"),
    [("~", None), ("", None), ("true", True), ("-3", -3), ("0o17", 15), ("0x1F", 31), ("1e3", 1000.0), ("x", "x")],
)
def test_plain_scalars_have_the_core_schemas_types(text: str, value: object) -> None:
    """Null, booleans, integers and floats are written as the core schema writes them."""
    assert yaml_text.resolve(text) == value


def test_text_between_tokens_is_read_as_in_yaml_1_2() -> None:
    """Tabs part tokens, a colon after a quote needs no space, and the directive of 1.1 changes nothing."""
    (document,), problems = yaml_text.read('%YAML 1.1\n---\na:\t"\\/ \\u2028"\nb: {"on":yes, c: [x\ty]}\n', "f")
    assert problems == []
    assert document.value == {"a": "/ \u2028", "b": {"on": "yes", "c": ["x\ty"]}}


def test_every_key_and_value_has_its_position() -> None:
    """Lines and columns count from 1."""
    (document,), _ = yaml_text.read("a:\n  - b: 1\n    c: 2\n", "f")
    assert document.keys["a", 0, "c"] == TextPosition(3, 5)
    assert document.marks["a", 0, "c"] == TextPosition(3, 8)
    assert document.problem(("a", 0, "nothing"), "m") == FileProblem("f", 2, 5, "m")


def test_documents_of_one_file_keep_their_own_text() -> None:
    """The text of each document is enough to read it again, and reads to the same."""
    documents, _ = yaml_text.read("# first\na: 1\n---\n  b: |\n    x\n...\n--- {c: 3}\n", "f")
    assert [document.value for document in documents] == [{"a": 1}, {"b": "x\n"}, {"c": 3}]
    for document in documents:
        (again,), _ = yaml_text.read(document.text, "f")
        assert (again.value, again.text) == (document.value, document.text)


def test_a_duplicate_key_is_an_error_at_the_second() -> None:
    """It says where the first is."""
    _, problems = yaml_text.read("a: 1\nb: 2\na: 3\n", "f")
    assert [str(problem) for problem in problems] == ["f:3:1: the key 'a' is written twice; first on line 1"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: b: c", "put the text in quotes"),
        ("\ta: 1", "spaces, not tabs"),
        ("a: 'x", "1:4: the quote that begins here is not closed"),
        ("1: x", "must be text"),
        ("<<: {a: 1}", "merge keys"),
        ("? [a]\n: 1", "a key must be plain text"),
        ("a: {{ x }}", '1:5: text that begins with {{ must be in quotes: "{{ x }}"'),
        ("a: {{ x }} and more # why", 'must be in quotes: "{{ x }} and more"'),
        ("{a: {{ x | default('b') }}}", "must be in quotes: \"{{ x | default('b') }}\""),
        ("- {{ x['y'] }}", "must be in quotes: \"{{ x['y'] }}\""),
        ('a: {{ x["y"] }}', "must be in quotes: '{{ x[\"y\"] }}'"),
        ("a: {{ x | f(1, 2) }}", 'must be in quotes: "{{ x | f(1, 2) }}"'),
        (
            "s:\n  - id: cap\n    action: x\n  with: {a: 1}\n",
            "4:3: 'with' belongs to no entry: indent it like the keys of",
        ),
        ("a: {b: 1\nc: 2\n", "1:4: the '{' is not closed"),
        ("a: [1, 2\nc: 2\n", "1:4: the '[' is not closed"),
        ("a: !python/object:os.system x", "tag"),
        ("a: &a [*a]", "anchor"),
        ("a: \x01", "not allowed in YAML"),
        ("a: " + "9" * 5000, "too long"),
        ("[" * 5000, "nested over"),
        ("- " * 5000, "nested over"),
        ("{" * 200_000, "must be in quotes"),
        ("a: [", "1:5: a '[' or a '{' is not closed"),
        ('a: "x\nb: 1\n', "1:4: the quote that begins here is not closed"),
        ("a: [\"x, 'y']\n---\nb: 2\n", "1:5: the quote that begins here is not closed"),
        ("a: 'x' y: 1", "1:8: 'y' belongs to no entry"),
        ("a: 'x' (y)", "1:8: expected key, but found '('"),
        ("a: @b", "1:4: text that begins with '@' must be in quotes"),
        ("a: [::1]", "1:5: text that begins with ':' must be in quotes"),
        ("a:\n  - b: 1\n    c: 2\n   - b: 2", "4:4: the indentation of this '-' matches no list"),
        ("a:\n  - b: 1\n - b: 2", "3:2: the indentation of this '-' matches no list"),
        ("a: 1\n\tb: 1", "2:1: YAML is indented with spaces, not tabs"),
        ('a: "\\ud800"', "half of a surrogate pair"),
        ("a: x\u2028y", "1:5: character '\\u2028' is not allowed in YAML"),
        ("\ufeffa: x", "1:1: character '\\ufeff' is not allowed in YAML"),
        ("&a.b x", "1:3: expected alphabetic or numeric character, but found '.' (while scanning an anchor)"),
    ],
)
def test_unsupported_yaml_is_rejected_with_its_place(text: str, told: str) -> None:
    """Each mistake is one line with file, line and column."""
    documents, problems = yaml_text.read(text, "f")
    assert any(told in str(problem) and problem.line for problem in problems), problems
    assert not documents or problems


def test_an_alias_bomb_is_rejected() -> None:
    """Aliases count as often as they are used, so a small file cannot become a large value."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefg", "bcdefgh", strict=True)]
    _, problems = yaml_text.read("\n".join(lines), "f")
    assert "over 50000 values" in problems[0].message


@pytest.mark.parametrize(
    ("raw", "told"),
    [(b"\xff\xfea\x00", "UTF-16"), (b"a: 1\nb: \xff", "not UTF-8"), (b"x" * (yaml_text.MAX_BYTES + 1), "bytes")],
)
def test_odd_encodings_and_sizes_are_rejected(raw: bytes, told: str) -> None:
    """A file is UTF-8, with or without a byte order mark, and bounded."""
    problem = yaml_text.decode(raw, "f")
    assert isinstance(problem, FileProblem)
    assert told in problem.message


def test_a_byte_order_mark_is_not_part_of_the_text() -> None:
    """Editors that write one do no harm."""
    assert yaml_text.decode(b"\xef\xbb\xbfa: 1", "f") == "a: 1"


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab:- \n\t[]{}&*!|>'\"#%@,?~01.\x00\ufeff")), max_size=60))
def test_no_text_crashes_the_reader(text: str) -> None:
    """Any text gives documents or problems."""
    documents, problems = yaml_text.read(text, "f")
    assert all(document.marks for document in documents)
    assert all(problem.message for problem in problems)


def test_a_yaml_library_that_lacks_its_parser_is_named() -> None:
    """PyYAML can be built without libyaml, by whoever compiles it."""
    program = "import sys; sys.modules['yaml._yaml'] = None; import trainmedic_core.yaml_text"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("ImportError: PyYAML is installed without libyaml")
