"""Whether a receiver's answer to an undo makes it certain that nothing is left to take back.

A receiver that has lost its memory finds nothing to take back either. So ``nothing_to_undo`` counts only where the
receiver says how it knows, and the server's own record of the command does not contradict it:

================================  ==============================  ==================================
the receiver says                 the command is on record as     the undo is
================================  ==============================  ==================================
``known: not_in_force``           anything                        done
``known: never_applied``          applied                         owed: the two contradict each other
``known: never_applied``          of unknown outcome              done
nothing, or anything else         anything                        owed: it may have forgotten
================================  ==============================  ==================================

Who calls it: ``commands``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmedic.wire import undoing


def doubt(output: Mapping[str, Any], was_applied: bool) -> str | None:
    """Why an undo that was answered ``applied`` with this output is not certain; None where it is.

    ``was_applied`` says whether the command that it takes back is on record as applied.
    """
    if not output.get(undoing.NOTHING):
        return None
    match output.get(undoing.KNOWN):
        case undoing.NOT_IN_FORCE:
            return None
        case undoing.NEVER_APPLIED if was_applied:
            return "says that it never applied the command, which it had answered as applied"
        case undoing.NEVER_APPLIED:
            return None
        case _:
            return "says that there is nothing to undo, and not how it knows: it may have forgotten the command"
