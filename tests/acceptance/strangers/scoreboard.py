"""Actual and expected outcome of each sending, and the share of the cases in which an act was right and done.

Not here: sending (``site``). Caller: ``test_strangers``, which prints `Scoreboard.table` at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.acceptance.strangers.cases import Outcome, Sending
from tests.acceptance.strangers.site import Reaction

LEAST_SHARE = 0.95
"""Share of the sendings with exactly one known subject that must act. Refusing everything is no solution."""


@dataclass(frozen=True)
class Result:
    """One sending and its outcome."""

    sending: Sending
    reaction: Reaction

    @property
    def is_right(self) -> bool:
        """True if one of the expected outcomes came, everything that can be reverted was, and a refusal says why."""
        is_explained = self.reaction.decision == "started" or bool(self.reaction.reason)
        is_expected = any(came(self.reaction, one) for one in self.sending.outcomes)
        return is_expected and is_explained and not self.reaction.left_over

    @property
    def counts(self) -> bool:
        """True if it counts for the share that must act. Under our own alert name, no map is asked."""
        case = self.sending.case
        return case.names_one and case.doubted is None and not self.sending.is_published

    @property
    def is_wrong_act(self) -> bool:
        """True if something was changed that no expected outcome changes."""
        allowed = {change for outcome in self.sending.outcomes for change in outcome.acts}
        return not set(self.reaction.changes) <= allowed

    def line(self) -> str:
        """One line of the table."""
        expected = " | ".join(str(outcome) for outcome in self.sending.outcomes)
        mark = "ok" if self.is_right else "ACT" if self.is_wrong_act else "no"
        reason = f"\n      {self.reaction.reason[:160]}" if self.reaction.reason and not self.is_right else ""
        return f"{mark:>3} {self.sending}\n      expected {expected}\n      came     {self.reaction}{reason}"


def came(reaction: Reaction, outcome: Outcome) -> bool:
    """Return whether that outcome is the actual one."""
    return (
        reaction.decision == outcome.decision
        and (outcome.target is None or reaction.target == outcome.target)
        and sorted(reaction.changes) == sorted(outcome.acts)
        and (outcome.told is None or any(outcome.told in message for message in reaction.told))
    )


@dataclass
class Scoreboard:
    """All results so far, in the order of their coming."""

    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> Result:
        self.results.append(result)
        return result

    @property
    def share(self) -> float:
        """The share of the sendings that must act and did, rightly; 1 where none must."""
        counted = [result.is_right for result in self.results if result.counts]
        return sum(counted) / len(counted) if counted else 1.0

    @property
    def wrong_acts(self) -> list[str]:
        return [str(result.sending) for result in self.results if result.is_wrong_act]

    def table(self) -> str:
        """Every sending with what was expected and what came, and the figures."""
        right = sum(result.is_right for result in self.results)
        counted = sum(result.counts for result in self.results)
        lines = [result.line() for result in self.results]
        return "\n".join(
            [
                *lines,
                f"{right} of {len(self.results)} right; {len(self.wrong_acts)} changed what they must not",
                f"of {counted} that name one known subject under our alert name, {self.share:.0%} act rightly",
            ]
        )
