"""Reliability of verdicts: right, unknown and wrong ones by confidence, over cases whose truth is known.

The directory holds `cases.yaml`, a list of cases with `id`, `truth`, `acceptable` and `culprit`, and one `ID.txt` per
case. A line such as `--- dmesg-node1.txt` in a case begins a further file of that name.

python -m benchmarks.verdicts DIR [--details]
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import yaml
from msgspec import Struct

from benchmarks.log_rules import shipped
from trainmedic_logs.diagnosis.verdict import Confidence, Verdict
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_logs.folder_diagnosis import diagnose_folder
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_server import telemetry

_FILE = re.compile(r"--- (?P<name>[\w][\w.-]{0,80})\s*$")
_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and | or )\d+)*)")
_VAGUE = frozenset({CauseClass.UNKNOWN, CauseClass.HANG})
"""Causes that state that something happened, and not why."""


class Outcome(StrEnum):
    RIGHT = "right"
    LENIENT = "lenient"
    """Not the truth, but an acceptable cause, never with high confidence."""
    UNKNOWN = "unknown"
    """The verdict names no cause, although the truth does."""
    WRONG = "wrong"


class Case(Struct, frozen=True):
    """A public failure, and its true cause."""

    id: str
    truth: CauseClass
    acceptable: frozenset[CauseClass]
    culprits: frozenset[int]
    """Ranks that began it. Empty if the truth names none."""
    victims: frozenset[int]
    """Ranks that the truth calls victims."""
    files: Mapping[str, str]


class Judged(Struct, frozen=True):
    """A case, its verdict, and the comparison."""

    case: Case
    verdict: Verdict
    outcome: Outcome
    is_culprit_right: bool | None
    """None if the truth or the verdict names no rank."""


def cases_in(directory: Path) -> Iterator[Case]:
    """Yield the cases of a directory, in the order of `cases.yaml`."""
    for each in yaml.safe_load((directory / "cases.yaml").read_text(encoding="utf-8")):
        text = (directory / f"{each['id']}.txt").read_text(encoding="utf-8")
        culprits, victims = _ranks(str(each.get("culprit", "-")))
        acceptable = frozenset(CauseClass(cause) for cause in each.get("acceptable", ()))
        yield Case(str(each["id"]), CauseClass(each["truth"]), acceptable, culprits, victims, files_of(text))


def files_of(text: str) -> dict[str, str]:
    name, files = "train.log", {}
    for line in text.splitlines(keepends=True):
        if name_line := _FILE.match(line):
            name = name_line["name"]
        else:
            files[name] = files.get(name, "") + line
    return files


def _ranks(culprit: str) -> tuple[frozenset[int], frozenset[int]]:
    culprits: set[int] = set()
    victims: set[int] = set()
    for clause in culprit.split(";"):
        named = {int(number) for listed in _RANKS.findall(clause) for number in re.findall(r"\d+", listed)}
        (victims if "victim" in clause else culprits).update(named)
    return frozenset(culprits), frozenset(victims)


def outcome(case: Case, verdict: Verdict) -> Outcome:
    """Compare a verdict's cause with the truth."""
    is_high = verdict.confidence is Confidence.HIGH
    is_truly_unknown = case.truth is CauseClass.UNKNOWN and verdict.cause in _VAGUE and not is_high
    if verdict.cause is case.truth or is_truly_unknown:
        return Outcome.RIGHT
    if verdict.cause in _VAGUE and not is_high:
        return Outcome.UNKNOWN
    return Outcome.LENIENT if verdict.cause in case.acceptable and not is_high else Outcome.WRONG


def judged(case: Case, directory: Path, rules: RuleSet) -> Judged:
    """Diagnose a case in `directory`."""
    for name, text in case.files.items():
        (directory / name).write_text(text, encoding="utf-8")
    verdict = diagnose_folder(directory, rules).attempts[-1].verdict
    named = set(verdict.ranks)
    is_culprit_right = None
    if named and (case.culprits or named & case.victims):
        is_culprit_right = named <= case.culprits
    return Judged(case, verdict, outcome(case, verdict), is_culprit_right)


def all_judged(directory: Path) -> list[Judged]:
    """Diagnose each case in a folder of its own."""
    results, rules = [], shipped()
    for case in cases_in(directory):
        with tempfile.TemporaryDirectory() as place:
            results.append(judged(case, Path(place), rules))
    return results


def table(results: Iterable[Judged]) -> str:
    """Return the outcomes by confidence, as text."""
    results = list(results)
    counts = Counter((each.verdict.confidence, each.outcome) for each in results)
    rows = [f"{'':8}{'all':>6}" + "".join(f"{outcome.value:>9}" for outcome in Outcome) + f"{'share right':>13}"]
    for confidence in (*Confidence, None):
        of = {kind: sum(n for (c, o), n in counts.items() if o is kind and confidence in (c, None)) for kind in Outcome}
        total, right = sum(of.values()), of[Outcome.RIGHT] + of[Outcome.LENIENT]
        name = confidence.value if confidence else "all"
        share = f"{right / total:.0%}" if total else "-"
        rows.append(f"{name:8}{total:>6}" + "".join(f"{of[kind]:>9}" for kind in Outcome) + f"{share:>13}")
    known = [each.is_culprit_right for each in results if each.is_culprit_right is not None]
    rows.append(f"ranks named where the truth names some: {sum(known)} right, {len(known) - sum(known)} wrong")
    return "\n".join(rows)


def main() -> None:
    """Print the table, and with `--details` a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory with cases.yaml and one text file per case")
    parser.add_argument("--details", action="store_true", help="print each case, its verdict and its truth")
    asked = parser.parse_args()
    telemetry.configure_logging("CRITICAL")
    results = all_judged(asked.directory)
    for each in results if asked.details else ():
        verdict = each.verdict
        ranks = "" if each.is_culprit_right is not False else f" (ranks {', '.join(map(str, verdict.ranks))} wrong)"
        told = f"{verdict.cause.value}, {verdict.confidence.value}"
        print(
            f"{each.case.id}: {each.outcome.value:8} {told:22} truth {each.case.truth.value}{ranks}: {verdict.summary}"
        )
    print(table(results))


if __name__ == "__main__":
    main()
