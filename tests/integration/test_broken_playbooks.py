"""A server goes on whose playbook files, templates or labels are written to do harm; it says so, and undoes what it
owes."""

from __future__ import annotations

import sqlite3
import urllib.request
from pathlib import Path

import pytest

from tests.support.live import Job, Server
from tests.support.messages import delivery
from tests.support.programs import eventually

PLAYBOOK = """
playbook: slow-down
on: {alert: Spike}
target: job
steps:
  - {id: slow, action: job.scale_lr, with: {factor: 0.5}, undo: on_resolve}
  - {id: better, wait_for: resolved, timeout: 1h}
"""
OTHER = PLAYBOOK.replace("slow-down", "other").replace("Spike", "Other")
BAD = [
    "{{ vars.x | round(precision=1, precision=2) }}",
    "{{ " + "9" * 5_000 + " }}",
    "{% for a in alerts %}" * 25 + "{% endfor %}" * 25,
    "{{ " + "not " * 210 + "true }}",
    "{% macro f() %}{% endmacro %}",
]


def playbooks(server: Server) -> Path:
    return server.directory / "playbooks"


def break_it(server: Server) -> None:
    """Put a file of bad templates in the place of the playbook that acts, and some beside it."""
    for number, text in enumerate(BAD):
        bad = PLAYBOOK.replace("slow-down", f"bad-{number}") + f'  - {{approve: "{text}"}}\n'
        (playbooks(server) / ("0.yaml" if number == 0 else f"bad{number}.yaml")).write_text(bad)


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def test_a_broken_file_is_reported_and_blocks_nothing(tmp_path: Path, redis_url: str) -> None:
    """The running server, the reload of other files, a start after a kill and a pending undo are unaffected."""
    with Server(tmp_path, f"{PLAYBOOK}\n---\n{OTHER}", "--redis", redis_url) as server, Job("llm", redis_url) as job:
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        eventually(lambda: job.done, 60, "applied")
        break_it(server)
        eventually(lambda: len(server.ask("/playbooks").body["errors"]) == len(BAD), 60, "errors told", 0.1)
        errors = server.ask("/playbooks").body["errors"]
        assert all(error["line"] and error["column"] for error in errors), errors
        assert {item["name"] for item in server.ask("/playbooks").body["items"]} == {"slow-down", "other"}
        ready = server.ask("/ready")
        assert ready.status == 200
        assert f"{len(BAD)} errors" in ready.body["playbooks"]["detail"]
        assert metric(server, "trainmedic_playbook_errors") == len(BAD)
        (playbooks(server) / "1.yaml").write_text(OTHER.replace("other", "renamed"))
        names = lambda: {item["name"] for item in server.ask("/playbooks").body["items"]}  # noqa: E731
        eventually(lambda: "renamed" in names(), 60, "other file reloaded", 0.1)
        server.kill()
        server.start()
        assert names() == {"renamed"}
        assert server.ask("/ready").status == 200
        assert len(server.ask("/playbooks").body["errors"]) == len(BAD)
        assert server.only_run()["owes_undo"] is True
        assert server.ask("/webhook", delivery("Spike", "llm", status="resolved")).status == 200
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2"]


def test_a_run_whose_stored_playbook_is_now_rejected_still_reverts(tmp_path: Path, redis_url: str) -> None:
    """An earlier version of the server accepted the playbook."""
    with Server(tmp_path, PLAYBOOK, "--redis", redis_url) as server, Job("llm", redis_url) as job:
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        eventually(lambda: job.done and server.only_run()["steps"][0]["status"] == "succeeded", 60, "applied")
        server.kill()
        break_it(server)
        (file,) = server.state.glob("*.db")
        with sqlite3.connect(file) as database:
            changed = database.execute(
                "UPDATE playbook_versions SET text = ?", ((playbooks(server) / "0.yaml").read_text(),)
            )
            assert changed.rowcount == 1
        database.close()
        server.start()
        run = server.closed_run()
        assert (run["status"], run["owes_undo"]) == ("failed", True)
        assert "approve" in run["message"]
        assert server.ask("/webhook", delivery("Spike", "llm", status="resolved")).status == 200
        assert server.undone_run()["steps"][0]["undo"]["status"] == "done"
        assert job.done == ["job.scale_lr 0.5", "job.scale_lr 2"]


@pytest.mark.parametrize("template", ["{{ '{:>1000000000}'.format('x') }}", "{{ 20000000 | round(20000000, 'ceil') }}"])
def test_a_template_that_explodes_fails_its_step(tmp_path: Path, redis_url: str, template: str) -> None:
    """The step gives the reason, and the server still answers."""
    text = PLAYBOOK.partition("steps:")[0] + f'steps:\n  - {{action: notify, with: {{message: "{template}"}}}}\n'
    with Server(tmp_path, text, "--redis", redis_url) as server, Job("llm", redis_url):
        assert server.ask("/webhook", delivery("Spike", "llm")).status == 200
        run = server.closed_run()
        assert run["status"] == "failed"
        assert template[3:20] in run["message"]
        assert server.ask("/health").status == 200


def test_no_label_hangs_the_server(tmp_path: Path, redis_url: str) -> None:
    """This holds for any pattern that it is matched with."""
    patterns = ["(llm|train|llm-train|-)+[0-9]*", ".*a.*a.*a.*a.*a.*b", "(a+)+b"]
    texts = [
        PLAYBOOK.replace("slow-down", f"p{number}").replace(
            "alert: Spike", f"alert: Spike, matchers: ['job_name=~\"{pattern}\"']"
        )
        for number, pattern in enumerate(patterns)
    ]
    with Server(tmp_path, "\n---\n".join(texts), "--redis", redis_url) as server:
        for name in ("llm-train-" * 36 + "!", "llm-train-" * 6_000 + "!", "a" * 60_000):
            posted = delivery("Spike", name)
            posted["alerts"][0]["fingerprint"] = "f1"
            assert server.ask("/webhook", posted).status == 200
            assert server.ask("/health").status == 200
        assert server.runs() == []
