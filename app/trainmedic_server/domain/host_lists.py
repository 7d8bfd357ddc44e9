"""Host lists of Slurm and similar tools: ``gpu-[01-03,7],login[1-9:2]``."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_HOSTS = 4096  # of an alert, file or playbook; more would delay other alerts
MOST_OF_JOB = 100_000  # of a job, as Slurm states them
LONGEST = 65_536  # characters
_LONGEST_NAME = 512  # characters
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12})(?:[:/]([0-9]{1,6}))?)?")
_MOST_BRACKETS = 6  # in a name, or within each other. Limits the recursion; Slurm reads more


class UnreadableHostList(ValueError):
    """The text is no host list, or names too many hosts."""


def is_host_list(text: str) -> bool:
    if text.startswith("[") and ":" in text:
        return False  # an IPv6 address with a port
    return "," in text or ("[" in text and "]" in text)


def expand(text: str, most: int = MOST_HOSTS) -> tuple[str, ...]:
    """Return the distinct hosts in order. Raises UnreadableHostList."""
    if len(text) > LONGEST:
        raise UnreadableHostList(f"is longer than {LONGEST} characters")
    hosts: dict[str, None] = {}
    read = 0
    for part in _split(text):
        if part:
            for host in _expanded(part, 0):
                # Count repeats too: a few ``[1,1,1]`` multiply to millions of one host.
                read += 1
                if read > most:
                    raise UnreadableHostList(f"names more than {most} hosts")
                if len(host) > _LONGEST_NAME:
                    raise UnreadableHostList(f"has a name of more than {_LONGEST_NAME} characters")
                hosts[host] = None
    return tuple(hosts)


def _split(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth < 0:
            raise UnreadableHostList("has a ']' without its '['")
        if depth == 0 and (character == "," or character.isspace()):
            yield text[begin:place]
            begin = place + 1
    if depth:
        raise UnreadableHostList("has a '[' without its ']'")
    yield text[begin:]


def _expanded(part: str, depth: int) -> Iterator[str]:
    begin = part.find("[")
    if begin < 0:
        yield part
        return
    if depth >= _MOST_BRACKETS:
        raise UnreadableHostList(f"has more than {_MOST_BRACKETS} brackets in a name")
    end = _closing(part, begin)
    for number in _numbers(part[begin + 1 : end], 0):
        for rest in _expanded(part[end + 1 :], depth + 1):
            yield f"{part[:begin]}{number}{rest}"


def _closing(part: str, begin: int) -> int:
    depth = 0
    for place in range(begin, len(part)):
        depth += (part[place] == "[") - (part[place] == "]")
        if depth == 0:
            return place
    raise UnreadableHostList("has a '[' without its ']'")


def _numbers(inside: str, depth: int) -> Iterator[str]:
    if depth >= _MOST_BRACKETS:
        raise UnreadableHostList("has too many brackets within brackets")
    for entry in _split(inside):
        if entry.startswith("[") and entry.endswith("]"):
            yield from _numbers(entry[1:-1], depth + 1)
            continue
        matched = _RANGE.fullmatch(entry)
        if matched is None:
            raise UnreadableHostList(f"has {entry[:40]!r} in brackets, which is no range of numbers")
        first, last, step = matched[1], matched[2] or matched[1], int(matched[3] or 1)
        if int(last) < int(first) or step < 1:
            raise UnreadableHostList(f"has the range {entry[:40]!r}, which goes backwards")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1, step))
