"""How examples are found on a page, and compared with what happened."""

from __future__ import annotations

from tests.support import doc_pages

PAGE = """# A page

```console exit=1
$ first \\
  --long
one … three

$ second
```

- in a list
  ```yaml file=a.yaml
  key: 1
  ```

```
free text
```
"""


def test_blocks_are_found_with_their_words_and_lines() -> None:
    """Indented ones count, without the indent; one without a kind is an illustration."""
    blocks = doc_pages.blocks(PAGE)
    assert [(block.kind, block.words, block.line) for block in blocks] == [
        ("console", ("exit=1",), 3),
        ("yaml", ("file=a.yaml",), 12),
        ("text", (), 16),
    ]
    assert blocks[1].body == "key: 1\n"
    assert blocks[1].option("file") == "a.yaml"


def test_commands_keep_their_output() -> None:
    """A backslash joins lines; empty lines are no output."""
    first, second = doc_pages.commands(doc_pages.blocks(PAGE)[0].body)
    assert (first.text, first.shown) == ("first \\\n  --long", ("one … three",))
    assert (second.text, second.shown) == ("second", ())


def test_what_is_shown_must_be_printed_in_order() -> None:
    """An ellipsis matches anything, and the width of gaps does not count."""
    printed = "zero\none two  three\nfour\n"
    assert doc_pages.is_shown(("one … three", "…", "four"), printed)
    assert doc_pages.is_shown(("one two three",), printed)
    assert not doc_pages.is_shown(("four", "one … three"), printed)
    assert not doc_pages.is_shown(("one",), printed)
