"""The example for Loki and VictoriaLogs: what Fluent Bit ships by it is what ``trainmedic logs`` reads.

``TRAINMEDIC_TEST_FLUENT_BIT`` names the program. Without it the example is only compared with what the SDK writes and
what the server asks for.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from tests.support import programs
from tests.support.log_stores.loki_stand_in import LokiStandIn
from tests.support.log_stores.served import Served
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_logs.domain.log_search import FoundLine, LogLevel, LogQuery
from trainmedic_server.adapters.log_stores.loki import Loki
from trainmedic_server.adapters.log_stores.paging import StoredLogs
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.system_clock import SystemClock

EXAMPLE = programs.ROOT / "examples" / "loki"
NODE, JOB = "gpu/07", "llm/1"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\n-----END PRIVATE KEY-----"
LINES = {
    "launcher": ["starting 8 ranks", "E0131 12:00:00.250000 140 torch/distributed/api.py:869] failed (exitcode: 1)"],
    "stdout": ["step 1 loss 2.1", "WARNING loss scale", "api_key=Zx81kLmQ", "hf_" + "Ab1" * 12, KEY, "tokens=None"],
    "records": ['{"ts": "2026-01-31T12:00:00Z", "level": "error", "message": "lost"}'],
}
MASKED = {"api_key=Zx81kLmQ": "api_key=***", "hf_" + "Ab1" * 12: "***"}


def settings() -> Mapping[str, Any]:
    read: Mapping[str, Any] = yaml.safe_load((EXAMPLE / "fluent-bit.yaml").read_text())
    return read


def files(log_dir: Path) -> dict[str, Path]:
    attempt = AttemptLogs.of(log_dir, JOB, 2)
    ranks = attempt.ranks(NODE) / "none_a1" / "attempt_0" / "1"
    return {"launcher": attempt.launcher(NODE), "stdout": ranks / "stdout.log", "records": attempt.records(11)}


def test_the_example_follows_the_files_that_the_sdk_writes() -> None:
    """Each kind matches one pattern, and rotated files match none."""
    patterns = settings()["pipeline"]["inputs"][0]["path"].replace("${TRAINMEDIC_LOG_DIR}", "/logs").split(",")
    for path in files(Path("/logs")).values():
        assert sum(fnmatch.fnmatch(str(path), pattern) for pattern in patterns) == 1, path
        assert not any(fnmatch.fnmatch(f"{path}.1", pattern) for pattern in patterns)


def test_the_example_has_the_labels_that_the_server_queries() -> None:
    query = LogQuery(JOB, datetime.now(UTC), attempt=2, rank=1, local_rank=1, node=NODE, level=LogLevel.ERROR)
    asked = set(re.findall(r"(\w+)=", " ".join(Loki(StoreHttp("http://h", {})).parts(query, (NODE,)))))
    labels = {name[1:] for name in settings()["pipeline"]["outputs"][0]["label_keys"].split(",")}
    metadata = set(re.findall(r"metadata\.(\w+)", (EXAMPLE / "trainmedic.lua").read_text()))
    assert asked & {"job", "node", "level", "source"} <= labels == {"job", "node", "source", "level"}
    assert asked - labels <= metadata


async def shipped(log_dir: Path, state: Path) -> list[FoundLine]:
    """What the server finds after the real program has shipped `LINES`."""
    for kind, path in files(log_dir).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(LINES[kind]) + "\n")
    AttemptLogs.of(log_dir, JOB, 2).sources(NODE, 1).write_text(json.dumps({"version": 1, "rank": 9}))
    state.mkdir()
    store = LokiStandIn()
    with Served(store.app) as served:
        host, port = served.url.removeprefix("http://").split(":")
        environment = {
            "TRAINMEDIC_LOG_DIR": str(log_dir), "TRAINMEDIC_NODE": "shipper-01", "FLUENT_BIT_STATE": str(state),
            "LOKI_HOST": host, "LOKI_PORT": port, "LOKI_URI": "/loki/api/v1/push", "LOKI_TLS": "off",
            "LOKI_TENANT": "training",
        }  # fmt: skip
        argv = [os.environ["TRAINMEDIC_TEST_FLUENT_BIT"], "-c", str(EXAMPLE / "fluent-bit.yaml")]
        with subprocess.Popen(argv, env={**os.environ, **environment}) as program:
            try:
                expected = sum(text.count("\n") + 1 for texts in LINES.values() for text in texts)
                programs.eventually(
                    lambda: len(store.lines(job=JOB)) >= expected, 90, "every line is in the store", 0.5
                )
            finally:
                program.send_signal(signal.SIGTERM)
        http = StoreHttp(served.url, {"X-Scope-OrgID": "training"})
        source = StoredLogs(Loki(http), SystemClock())
        batches = [
            batch async for batch in source.search(LogQuery(JOB, datetime.now(UTC) - timedelta(hours=1)), (), 99)
        ]
        await http.close()
    return [line for batch in batches for line in batch.lines]


if os.environ.get("TRAINMEDIC_TEST_FLUENT_BIT"):

    async def test_every_line_is_found_with_its_node_rank_and_level(tmp_path: Path) -> None:
        """torchrun's files get their global rank from the sources file. Secrets are masked."""
        found = await shipped(tmp_path / "logs", tmp_path / "state")
        by_text = {line.text: line for line in found}
        of = {kind: [MASKED.get(text, text) for text in texts if text != KEY] for kind, texts in LINES.items()}
        assert sum(line.text == "***" for line in found) == 4  # the token, and each line of the key
        for kind, (source, rank) in {"launcher": ("launcher", None), "stdout": ("training", 9)}.items():
            for text in of[kind]:
                line = by_text[text]
                assert (line.node, line.attempt, line.source, line.rank) == (NODE, 2, source, rank), text
        levels = [by_text[text].level for text in (*of["launcher"], *of["stdout"][:2])]
        assert levels == [LogLevel.INFO, LogLevel.ERROR, LogLevel.INFO, LogLevel.WARNING]
        assert "tokens=None" in by_text
        assert {line.rank for line in found if line.level is LogLevel.ERROR} == {None, 11}
