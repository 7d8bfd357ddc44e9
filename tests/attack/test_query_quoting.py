"""Names that try to leave their place in a query: of Prometheus, Loki and VictoriaLogs.

A job's name comes from whoever starts the job. Read back by a parser of its own, each literal is the name again, and
the rest of the query is what it is for a harmless name. A real Prometheus reads the literals of PromQL as well.
"""

from __future__ import annotations

import json
import random
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.attack.effort import random_source, trials
from tests.support.programs import start_prometheus
from trainmedic_logs.domain.log_search import LogLevel, LogQuery
from trainmedic_server.adapters.log_stores.loki import Loki
from trainmedic_server.adapters.log_stores.victorialogs import VictoriaLogs
from trainmedic_server.domain import promql

NAMES = trials(400, 50_000)
PIECES = (
    *('"', "'", "`", "\\", "\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85", "{", "}", "(", ")", "|", "#", "$"),
    *("${1}", "$job", "%s", "{{", "}}", "=~", '"} or up{a="', "\\u0022", "\\x22", "\\042", "\\", "//", "/*", "-- "),
    *(
        "\u2028",
        "\u202e",
        "\ufeff",
        "\ufffd",
        "\ud800",
        "\udfff",
        "\U0001f600",
        "\U000e0001",
        "é",
        "job",
        "a",
        "1",
        " ",
    ),
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\"}
_NUMBERS = {"x": 2, "u": 4, "U": 8}


def hostile_names(source: random.Random, count: int = NAMES) -> Iterator[str]:
    yield from PIECES
    for _ in range(count):
        yield "".join(source.choice(PIECES) for _ in range(source.randint(1, 12)))


def shown(name: str, instead: str = "\ufffd") -> str:
    """The name as a query can carry it: half of a surrogate pair is no character."""
    return re.sub("[\ud800-\udfff]", instead, name)


def literal_at(query: str, begin: int) -> tuple[str, int]:
    """Read the string of Go that begins with the quote at `begin`; return it and the place behind it. Raises
    ValueError."""
    quote, place, read = query[begin], begin + 1, ""
    while query[place] != quote:
        if query[place] == "\n":
            raise ValueError("a line feed within a string")
        if query[place] != "\\":
            read, place = read + query[place], place + 1
            continue
        kind = query[place + 1]
        if kind in _NUMBERS:
            digits = query[place + 2 : place + 2 + _NUMBERS[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_NUMBERS[kind]}}}", digits):
                raise ValueError(f"no number: {digits}")
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF or (kind == "x" and code > 0x7F):
                raise ValueError(f"no character: {digits}")
            read, place = read + chr(code), place + 2 + _NUMBERS[kind]
        elif kind == quote or kind in _ESCAPES:
            read, place = read + _ESCAPES.get(kind, quote), place + 2
        else:
            raise ValueError(f"no escape: {kind!r}")
    return read, place + 1


def taken_apart(query: str) -> tuple[str, list[str]]:
    """The query with `?` in place of its literals, and the literals."""
    skeleton, literals, place = "", [], 0
    while place < len(query):
        if query[place] in "\"'`":
            literal, place = literal_at(query, place)
            literals.append(literal)
            skeleton += "?"
        else:
            skeleton, place = skeleton + query[place], place + 1
    return skeleton, literals


def test_the_test_parser_accepts_what_go_accepts() -> None:
    """It also refuses what Go refuses."""
    assert taken_apart(r'a{b="c\"\\\u0022\n"} # ') == ("a{b=?} # ", ['c"\\"\n'])
    for wrong in ('"a\nb"', r'"\ud800"', r'"\q"', r'"\u12"', r"""'\"'""", r'"\xff"'):
        with pytest.raises(ValueError):
            taken_apart(wrong)
    with pytest.raises(IndexError):
        taken_apart('"open')


def logs_of(store: Loki | VictoriaLogs) -> Callable[[str], list[str]]:
    def queries(name: str) -> list[str]:
        since = datetime.now(UTC) - timedelta(hours=1)
        query = LogQuery(
            name, since, attempt=1, rank=2, node=name, grep=name, level=LogLevel.ERROR, kernel=True, pods=(name,)
        )
        return list(store.parts(query, (name,)))

    return queries


def of_prometheus(name: str) -> list[str]:
    return [promql.narrowed(f"up{{job={promql.quoted(name)}}}", {"job": name})]


@pytest.mark.parametrize(
    "queries",
    [logs_of(Loki(None)), logs_of(VictoriaLogs(None)), of_prometheus],  # type: ignore[arg-type]
    ids=["loki", "victorialogs", "prometheus"],
)
def test_no_name_escapes_its_literal_in_a_query(queries: Callable[[str], list[str]]) -> None:
    """The rest of the query does not change, and the first literal is the name."""
    harmless = [taken_apart(query)[0] for query in queries("x")]
    for name in hostile_names(random_source()):
        apart = [taken_apart(query) for query in queries(name)]
        assert [skeleton for skeleton, _ in apart] == harmless, ascii(name)
        assert apart[0][1][0] in (shown(name), shown(name, "?")), ascii(name)


def test_a_real_prometheus_reads_each_name_unchanged(tmp_path: Path) -> None:
    """This holds in a string and in a matcher."""
    config = tmp_path / "prometheus.yml"
    config.write_text("{}")
    program, url = start_prometheus(config, tmp_path)
    with program:
        for name in hostile_names(random_source(), trials(100, 2000)):
            assert answered(url, promql.quoted(name)) == shown(name), ascii(name)
            query = promql.narrowed(f"up{{job={promql.quoted(name)}}}", {"job": name})
            assert answered(url, query) == [], ascii(name)


def answered(url: str, query: str) -> object:
    form = urllib.parse.urlencode({"query": query}).encode()
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query", data=form, timeout=60) as reply:
            result = json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return result["result"][1] if result["resultType"] == "string" else result["result"]
