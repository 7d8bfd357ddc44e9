"""The agent's log: JSON lines on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from trainmedic.wire.envelope import Command

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        line |= {"event": record.getMessage(), "level": record.levelname.lower(), "logger": record.name}
        line["timestamp"] = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # ASCII, so that no external name or path can control a terminal.
        return json.dumps(line, default=str)


def command_fields(command: Command, **fields: str) -> dict[str, str]:
    return {"action": command.action, "command": command.id, "run_id": command.run_id, **fields}


def configure(level: str, stream: TextIO | None = None) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
