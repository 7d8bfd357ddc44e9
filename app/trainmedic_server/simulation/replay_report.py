"""Replay as plain text, from its JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainmedic_core import words
from trainmedic_core.cli import table

_PLAYBOOKS = ("PLAYBOOK", "SAME", "DIFFERENT", "NOT KNOWN", "GPU-HOURS THEN", "GPU-HOURS NOW", "THEN", "NOW")
_DIFFERENCES = ("ALERTS", "PLAYBOOK", "ALERT", "THEN", "NOW", "EXAMPLE", "WHY")
_WHY = {
    "target": "its target is not known",
    "playbook": "the playbook uses what a replay does not judge: a group, only_during, a queue or per_target",
    "earlier_run": "it depends on whether an earlier run started, or when it ended",
    "breaker": "it depends on whether the breaker opened",
    "reports": "it depends on when the alert was reported again",
}


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    if not document["alerts"]:
        yield "No alert was recorded in this time."
        return
    counted = [f"{document['without_playbook']} with no playbook then or now"]
    if over := document["resolved_at_first_report"]:
        counted.append(f"{over} over when first reported")
    yield (
        f"{words.count(document['alerts'], 'alert')} from {document['from']} until {document['until']}, "
        f"replayed in mode {document['mode']}: {', '.join(counted)}."
    )
    if given := document["given_runs"]:
        yield f"{words.count(given, 'run')} taken as recorded: started by people, or before the first alert."
    if openings := document["breaker_may_have_opened"]:
        first = openings[0]
        yield (
            f"The breaker may have opened {words.how_often(len(openings))}, first at {first['at']}: "
            f"{words.plain(first['why'])}."
        )
    yield ""
    yield from table.rows(_PLAYBOOKS, [_playbook(each) for each in document["playbooks"]], table.width())
    hours = [each[when] for each in document["playbooks"] for when in ("gpu_hours_then", "gpu_hours_now")]
    if any(each["runs_of_unknown_size"] for each in hours):
        yield "(+N): without N runs on targets whose number of GPUs is not known."
    if not document["differences"]:
        return
    yield ""
    yield "Where they differ, or where the record does not tell:"
    yield from table.rows(_DIFFERENCES, [_difference(each) for each in document["differences"]], table.width())
    if more := document["more_differences"]:
        yield f"{more} more kinds of differences; --limit shows more."


def _playbook(compared: Mapping[str, Any]) -> tuple[object, ...]:
    counts = (compared["same"], compared["different"], compared["not_known"])
    times = (_hours(compared["gpu_hours_then"]), _hours(compared["gpu_hours_now"]))
    return (compared["playbook"], *counts, *times, _decisions(compared["then"]), _decisions(compared["now"]))


def _decisions(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_words(decision)} {count}" for decision, count in counts.items())


def _words(decisions: str) -> str:
    return " or ".join(words.words(decision) for decision in decisions.split(" or "))


def _hours(time: Mapping[str, Any]) -> str:
    least, most = time["at_least"], time["at_most"]
    if most is None:
        hours = f"{least:.2f} or more"
    else:
        hours = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
    return hours + (f" (+{time['runs_of_unknown_size']})" if time["runs_of_unknown_size"] else "")


def _difference(each: Mapping[str, Any]) -> tuple[object, ...]:
    example = each["example"]
    where = f"{example['first_heard']} {example['target'] or ''}".rstrip()
    why = "; ".join(filter(None, (_WHY.get(each["depends_on"]), each["why"])))
    return each["count"], each["playbook"], each["alert"], _words(each["then"]), _words(each["now"]), where, why
