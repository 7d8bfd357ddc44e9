"""The example for Elasticsearch and OpenSearch: what its pipeline makes of lines is what ``trainmedic logs`` reads.

The same test runs on a real store that ``TRAINMEDIC_TEST_ELK_URL`` names, and ships with the Fluent Bit that
``TRAINMEDIC_TEST_FLUENT_BIT`` names. Without them a stand-in takes the documents as a shipper sends them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml

from tests.support import programs
from tests.support.log_stores.opensearch_stand_in import OpenSearchStandIn
from tests.support.log_stores.served import Served
from trainmedic.wire.log_layout import AttemptLogs
from trainmedic_logs.domain.log_search import FoundLine, LogLevel, LogQuery
from trainmedic_server.adapters.log_stores.opensearch import OpenSearch
from trainmedic_server.adapters.log_stores.paging import StoredLogs
from trainmedic_server.adapters.log_stores.store_http import StoreHttp
from trainmedic_server.adapters.system_clock import SystemClock

EXAMPLE = programs.ROOT / "examples" / "elk"
NODE = "gpu/07"


@dataclass(frozen=True)
class Written:
    """A line of a job's log, and what is to be known of it."""

    text: str
    kind: str = "launcher"
    """The file that it is in: launcher, stdout or records."""
    level: LogLevel = LogLevel.INFO
    rank: int | None = None
    at: datetime | None = None
    """None where the line says none, so that its arrival counts."""
    shown: str = ""
    """What is shown, where that is not the text."""


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in main
    step(batch)
    ^^^^^^^^^^^
  [Previous line repeated 2 more times]
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"""


def lines_at(at: datetime) -> dict[str, Written]:
    """What programs write at that time, with 250 ms, on a node whose zone is +02:00; by the program's name."""
    local = at + timedelta(hours=2)
    day, clock, second, iso = (
        f"{local:%Y-%m-%d}",
        f"{local:%H:%M:%S}",
        at.replace(microsecond=0),
        f"{at:%Y-%m-%dT%H:%M:%S}",
    )
    record = {"ts": f"{iso}.250Z", "node": NODE, "node_rank": 1, "rank": 11, "level": "error"}
    warning, error = LogLevel.WARNING, LogLevel.ERROR
    llama = f"[INFO|trainer.py:2414] {day} {clock},250 >> ***** Running training *****"
    glog = f"E{local:%m%d} {clock}.250000 140 torch/distributed/elastic/api.py:869] failed (exitcode: 1)"
    return {
        "Python's logging": Written(f"{day} {clock},250 - trainer - WARNING - loss scale", level=warning, at=at),
        "DeepSpeed": Written(f"[{day} {clock},250] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0", at=at),
        "Megatron": Written(f" [{day} {clock}] iteration      100/    1000 | lm loss: 2.1E+00 |", at=second),
        "torchrun": Written(glog, level=error, at=at),
        "LLaMA-Factory": Written(f"[INFO|{day} {clock}] llamafactory.hparams.parser:143 >> Process rank: 0", at=second),
        "LLaMA-Factory's trainer": Written(llama, at=at),
        "bare": Written("step 100 loss 2.1"),
        "with a zone": Written(f"{iso}.250Z DEBUG warm", level=LogLevel.DEBUG, at=at),
        "a rank's prefix": Written(f"[rank3]: {day} {clock},250 ERROR lost", level=error, rank=3, at=at),
        "colours": Written("\x1b[31mERROR\x1b[0m lost", level=error, shown="ERROR lost"),
        "a traceback": Written(TRACEBACK, kind="stdout", level=error),
        "tqdm": Written("  3%|#         | 3/100", kind="stdout"),
        "a record": Written(json.dumps(record), kind="records", level=error, rank=11, at=at),
    }


def path_of(log_dir: Path, job: str, kind: str) -> Path:
    logs = AttemptLogs.of(log_dir, job, 2)
    files = {
        "launcher": logs.launcher(NODE),
        "stdout": logs.ranks(NODE) / "none_a1" / "attempt_0" / "1" / "stdout.log",
        "records": logs.records(11),
    }
    return files[kind]


Ship = Callable[[Sequence[Written], Path, str, str], None]
"""Brings lines of a job in a log directory into the store at a URL."""


def as_a_shipper_sends(written: Sequence[Written], log_dir: Path, job: str, url: str) -> None:
    """Each line with its path, node, zone and time of arrival, by ``_bulk``."""
    lines = []
    for each in written:
        document = {"message": f"{each.text}\n", "path": str(path_of(log_dir, job, each.kind)), "node": "shipper-01"}
        document |= {"timezone": "+02:00", "@timestamp": datetime.now(UTC).isoformat()}
        lines += [json.dumps({"create": {"_index": INDEX}}), json.dumps(document)]
    headers = {"Content-Type": "application/x-ndjson"}
    httpx.post(f"{url}/_bulk?refresh=true", content="\n".join(lines) + "\n", headers=headers).raise_for_status()


def by_fluent_bit(written: Sequence[Written], log_dir: Path, job: str, url: str) -> None:
    """The real one, with the example's configuration, over the files."""
    for each in written:
        path = path_of(log_dir, job, each.kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(each.text + "\n")
    host, port = url.removeprefix("http://").split(":")
    environment = {
        "TRAINMEDIC_LOG_DIR": str(log_dir), "TRAINMEDIC_NODE": "shipper-01", "TRAINMEDIC_TIMEZONE": "+02:00",
        "FLUENT_BIT_STATE": str(log_dir), "OPENSEARCH_HOST": host, "OPENSEARCH_PORT": port, "OPENSEARCH_TLS": "off",
        "OPENSEARCH_USER": "u", "OPENSEARCH_PASSWORD": "p",
    }  # fmt: skip
    argv = [os.environ["TRAINMEDIC_TEST_FLUENT_BIT"], "-c", str(EXAMPLE / "fluent-bit.yaml")]
    with subprocess.Popen(argv, env={**os.environ, **environment}) as program:
        time.sleep(8)
        program.send_signal(signal.SIGTERM)


INDEX = "logs-trainmedic-default"
SHIPPERS: dict[str, Ship] = {"documents": as_a_shipper_sends}
if os.environ.get("TRAINMEDIC_TEST_FLUENT_BIT"):
    SHIPPERS["Fluent Bit"] = by_fluent_bit
STORES = ["stand-in", *(["real"] if os.environ.get("TRAINMEDIC_TEST_ELK_URL") else [])]


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A store that was set up as the documentation says."""
    if request.param == "real":
        url = os.environ["TRAINMEDIC_TEST_ELK_URL"].rstrip("/")
        set_up(url)
        yield url
        return
    with Served(OpenSearchStandIn(pipeline=read("ingest-pipeline.json")).app) as served:
        yield served.url


def set_up(url: str) -> None:
    version = httpx.get(url).raise_for_status().json()["version"]
    is_opensearch = version.get("distribution") == "opensearch"
    folder = "opensearch" if is_opensearch else "elasticsearch"
    policies = "_plugins/_ism/policies" if is_opensearch else "_ilm/policy"
    puts = {
        "_ingest/pipeline/trainmedic-logs": "ingest-pipeline.json",
        f"{policies}/trainmedic-logs": f"{folder}/lifecycle-policy.json",
        "_index_template/trainmedic-logs": f"{folder}/index-template.json",
    }
    for path, name in puts.items():
        answer = httpx.put(f"{url}/{path}", json=read(name))
        assert answer.is_success or answer.status_code == 409, answer.text  # a policy that is there already


def read(name: str) -> Any:
    return json.loads((EXAMPLE / name).read_text())


@pytest.fixture(params=SHIPPERS)
async def shipped(
    request: pytest.FixtureRequest, store_url: str, tmp_path: Path
) -> AsyncIterator[tuple[dict[str, Written], list[FoundLine]]]:
    """What was written for a job, and all its lines as the server finds them."""
    at = (datetime.now(UTC) - timedelta(minutes=20)).replace(microsecond=250_000)
    lines = lines_at(at)
    job = f"llm/{uuid4()}"
    SHIPPERS[request.param](list(lines.values()), tmp_path / "logs", job, store_url)
    http = StoreHttp(store_url, {})
    source = StoredLogs(OpenSearch(http), SystemClock())
    batches = [each async for each in source.search(LogQuery(job, at - timedelta(hours=1)), (), 1000)]
    yield lines, [line for batch in batches for line in batch.lines]
    await http.close()


async def test_every_line_is_found_with_its_time_rank_node_and_level(
    shipped: tuple[dict[str, Written], list[FoundLine]],
) -> None:
    """A traceback is one document, and a line that starts with a space is its own document."""
    lines, found = shipped
    by_text = {line.text: line for line in found}
    assert len(found) == len(lines)
    for name, written in lines.items():
        line = by_text[written.shown or written.text]
        assert (line.node, line.attempt, line.rank, line.level) == (NODE, 2, written.rank, written.level), name
        assert line.source == ("launcher" if written.kind == "launcher" else "training"), name
        if written.at is not None:
            assert abs(line.at - written.at) < timedelta(milliseconds=1), name
        else:
            assert abs(line.at - datetime.now(UTC)) < timedelta(minutes=5), name


def test_the_templates_map_every_searched_field() -> None:
    """As keywords and numbers, under the names that the server queries; both stores differ only in the life cycle."""
    query = LogQuery(
        "j", datetime.now(UTC), attempt=1, rank=2, node_rank=3, node="n", level=LogLevel.ERROR, kernel=True
    )
    parts = [json.loads(part) for part in OpenSearch(StoreHttp("http://h", {})).parts(query, ("n",))]
    asked = {name for part in parts for each in part for name in next(iter(each.values()))}
    assert asked == {"job", "node", "rank", "attempt", "node_rank", "level", "source"}
    elastic, opensearch = (read(f"{each}/index-template.json") for each in ("elasticsearch", "opensearch"))
    mapped = {name: each["type"] for name, each in elastic["template"]["mappings"]["properties"].items()}
    assert asked <= mapped.keys()
    assert {name for name in asked if mapped[name] == "integer"} == {"rank", "attempt", "node_rank"}
    assert {name for name in asked if mapped[name] == "keyword"} == {"job", "node", "level", "source"}
    assert (mapped["@timestamp"], mapped["message"]) == ("date_nanos", "text")
    assert elastic["template"]["settings"].pop("index.lifecycle.name") == "trainmedic-logs"
    assert elastic == opensearch
    assert elastic["template"]["settings"]["index.default_pipeline"] == "trainmedic-logs"


def test_both_policies_roll_over_and_delete_at_the_same_age() -> None:
    phases = read("elasticsearch/lifecycle-policy.json")["policy"]["phases"]
    policy = read("opensearch/lifecycle-policy.json")["policy"]
    states = {state["name"]: state for state in policy["states"]}
    hot, ism = phases["hot"]["actions"]["rollover"], states["hot"]["actions"][0]["rollover"]
    assert (hot["max_age"], hot["max_primary_shard_size"]) == (ism["min_index_age"], ism["min_primary_shard_size"])
    assert phases["delete"]["min_age"] == states["hot"]["transitions"][0]["conditions"]["min_rollover_age"]
    assert policy["ism_template"][0]["index_patterns"] == read("opensearch/index-template.json")["index_patterns"]


def test_every_shipper_reads_the_same_files_into_the_same_data_stream() -> None:
    """With node, path and zone; each joins a traceback and leaves other indented lines separate."""
    filebeat, fluent, vector = (
        yaml.safe_load((EXAMPLE / name).read_text()) for name in ("filebeat.yml", "fluent-bit.yaml", "vector.yaml")
    )
    trainings = filebeat["filebeat.inputs"][0]
    assert trainings["paths"] == vector["sources"]["trainings"]["include"]
    tailed = fluent["pipeline"]["inputs"][0]["path"].split(",")
    assert [path.replace("/**/", "/*/*/*/") for path in trainings["paths"]] == tailed
    stream = vector["sinks"]["store"]["data_stream"]
    names = {filebeat["output.elasticsearch"]["index"], fluent["pipeline"]["outputs"][0]["index"]}
    assert names | {"-".join((stream["type"], stream["dataset"], stream["namespace"]))} == {INDEX}
    logstash = (EXAMPLE / "logstash.conf").read_text()
    assert re.findall(r'data_stream_\w+ => "(\w+)"', logstash) == INDEX.split("-")
    continued = trainings["parsers"][0]["multiline"]["pattern"]
    assert vector["sources"]["trainings"]["multiline"]["condition_pattern"] == continued
    assert fluent["multiline_parsers"][0]["rules"][1]["regex"] == f"/{continued}/"
    first, *others = TRACEBACK.splitlines()
    assert re.match(fluent["multiline_parsers"][0]["rules"][0]["regex"].strip("/"), first)
    assert all(re.match(continued, line) for line in others)
    alone = [each.text for each in lines_at(datetime.now(UTC)).values() if each.text != TRACEBACK]
    assert not [line for line in alone if re.match(continued, line)]
