"""``trainmedic backup``: a copy that is made while a server writes is whole, and a server goes on from it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.live import Server
from tests.support.messages import delivery
from tests.support.programs import eventually
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import backup
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.cli.backup import backup as command

PLAYBOOK = """
playbook: look
on: {alert: Spike}
target: job
steps:
  - {notify: a spike}
"""


def back_up(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments])


class Deliveries(threading.Thread):
    """Posts a hundred alerts a second at most, one after the other; `acknowledged` are the jobs of those that were."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self.acknowledged: list[str] = []
        self.over = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.over.wait(0.01):
            number += 1
            if self._server.ask("/webhook", delivery("Spike", f"job-{number}")).status == 200:
                self.acknowledged.append(f"job-{number}")

    def __enter__(self) -> Deliveries:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def test_a_server_resumes_from_a_copy_made_under_load(tmp_path: Path) -> None:
    """The copy has all that was acknowledged before it; webhooks continue, and no other file is left."""
    copies = tmp_path / "copies"
    copies.mkdir()
    with Server(tmp_path / "first", PLAYBOOK, "--mode", "observe") as server, Deliveries(server) as deliveries:
        before, copy = list[str](), copies / "trainmedic.db"

        def copied_after_twenty() -> bool:
            before[:] = deliveries.acknowledged
            copy.unlink(missing_ok=True)
            done = back_up("--state-dir", server.state, copy)
            assert done.exit_code == 0, done.output
            assert "read back" in done.output
            return len(before) >= 20

        eventually(copied_after_twenty, 60, "alerts arrive while copies are made", every=0.02)
    assert [path.name for path in copies.iterdir()] == ["trainmedic.db"]
    restored = Server(tmp_path / "second", PLAYBOOK, "--mode", "observe")
    copies.rename(restored.state)
    with restored:
        heard = {item["labels"]["job_name"] for item in all_alerts(restored)}
        assert set(before) <= heard
        assert restored.ask("/webhook", delivery("Spike", "later")).status == 200
        assert "later" in {item["labels"]["job_name"] for item in all_alerts(restored)}


def all_alerts(server: Server) -> list[dict[str, dict[str, str]]]:
    items: list[dict[str, dict[str, str]]] = []
    cursor = ""
    while True:
        page = server.ask(f"/alerts?limit=1000{cursor}").body
        items += page["items"]
        if page["next"] is None:
            return items
        cursor = f"&cursor={page['next']}"


async def test_a_failed_copy_leaves_no_file(tmp_path: Path) -> None:
    """Each failure gives its reason; an existing file stays unchanged."""
    store, copied = tmp_path / "trainmedic.db", tmp_path / "copy.db"
    none = back_up("--state-dir", tmp_path, copied)
    assert (none.exit_code, "no run store" in none.stderr) == (2, True)
    await SqlStore.open(f"sqlite:///{store}").close()
    unnamable = back_up("--state-dir", tmp_path, tmp_path / ("x" * 300))
    assert (unnamable.exit_code, "could not be copied" in unnamable.stderr) == (3, True)
    pages = store.read_bytes()
    store.write_bytes(pages[: len(pages) // 2] + bytes(4096) + pages[len(pages) // 2 + 4096 :])
    damaged = back_up("--state-dir", tmp_path, copied)
    assert (damaged.exit_code, "could not be copied" in damaged.stderr) == (3, True)
    other = back_up("--database", "postgresql://user:hunter2@host/db", copied)
    assert (other.exit_code, "pg_dump" in other.stderr, "hunter2" in other.stderr) == (2, True, False)
    assert not list(tmp_path.glob("copy.db*"))
    copied.write_text("mine")
    there = back_up("--state-dir", tmp_path, copied)
    assert (there.exit_code, copied.read_text()) == (2, "mine")


async def test_two_copies_to_one_file_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first complete copy gets the name, the other is rejected; only that file is touched."""
    url, copied, beside = f"sqlite:///{tmp_path}/trainmedic.db", tmp_path / "copy.db", tmp_path / "copy.db.partial"
    await SqlStore.open(url).close()
    beside.write_text("mine")
    copy_pages = backup._copy_pages

    def while_another_copies(source: Path, target: Path) -> None:
        monkeypatch.setattr(backup, "_copy_pages", copy_pages)
        backup.copy(url, copied)
        copy_pages(source, target)

    monkeypatch.setattr(backup, "_copy_pages", while_another_copies)
    with pytest.raises(errors.ConfigurationError, match="exists already"):
        backup.copy(url, copied)
    assert sorted(tmp_path.glob("copy.db*")) == [copied, beside]
    assert (beside.read_text(), copied.stat().st_mode & 0o777) == ("mine", 0o600)
    await SqlStore.open(f"sqlite:///{copied}").close()
