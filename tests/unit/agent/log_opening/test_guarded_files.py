"""Whose rights open a file: of whoever named it, or can have placed it.

With root's capabilities each test runs by the users' real rights and by file modes, otherwise by file modes alone.
Tests that need files of other users say so; their siblings without that need run everywhere.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.two_users import ANN, BOB, MAY_GIVE, MAY_TAKE, TEAM, WAYS, directory, file, open_place, switch_of
from trainmedic_agent.log_opening import guarded_files
from trainmedic_agent.log_opening.guarded_files import GuardedFiles
from trainmedic_agent.log_opening.node_files import LogRefused, NamedBy, UnreadReason
from trainmedic_agent.log_opening.rights import Rights, UserDatabase, has_acl
from trainmedic_agent.log_opening.thread_rights import ThreadRights

SECRET = "the-secret-of-bob\n"
OTHER_UID = 4_000_000
"""An owner for the opener that this process is not, so that its own files count as a user's."""
real_users = pytest.mark.skipif(not MAY_GIVE, reason="files of other users take CAP_CHOWN and CAP_DAC_OVERRIDE to make")


@pytest.fixture
def place() -> Iterator[Path]:
    with open_place() as made:
        yield made


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def guarded(place: Path, way: str, own_uid: int | None = None) -> GuardedFiles:
    return GuardedFiles([str(place), f"{place}/logs"], switch=switch_of(way), own_uid=own_uid)


def content(files: GuardedFiles, path: Path, named_by: NamedBy | None = None) -> str:
    with os.fdopen(files.open(str(path), named_by)) as opened:
        return opened.read()


def named_by(path: Path) -> NamedBy:
    facts = path.stat()
    return NamedBy(str(path), facts.st_dev, facts.st_ino)


def sources_of(place: Path, owner: int, job: str = "job") -> NamedBy:
    """A sources file of a user, in a directory of his job."""
    attempt = directory(directory(place / "logs" / job, owner) / "attempt-1", owner)
    return named_by(file(attempt / "sources-n1-0.json", "{}", owner, 0o644))


def test_with_the_capabilities_users_rights_are_really_adopted() -> None:
    """Otherwise the tests below would silently verify only the weaker method."""
    effective = int(Path("/proc/thread-self/status").read_text().split("CapEff:")[1].split()[0], 16)
    has_both = effective >> 6 & 3 == 3
    assert has_both or not MAY_TAKE
    if has_both and os.geteuid() == 0 and "0 4294967295" in " ".join(Path("/proc/self/uid_map").read_text().split()):
        assert WAYS == ("modes", "rights")


# --- what a job names ---------------------------------------------------------------------------------------


@real_users
def test_a_name_gives_the_rights_of_its_author(place: Path, way: str) -> None:
    """Ann's job may name Ann's files and public ones, but no private file of Bob."""
    files, sources = guarded(place, way), sources_of(place, ANN)
    own = file(directory(place / "ann", ANN, 0o700) / "own.log", "own\n", ANN)
    public = file(directory(place / "bob", BOB) / "public.log", "public\n", BOB, 0o644)
    private = file(place / "bob" / "private.log", SECRET, BOB)
    hidden = file(directory(place / "hidden", BOB, 0o700) / "readable.log", SECRET, BOB, 0o644)
    assert (content(files, own, sources), content(files, public, sources)) == ("own\n", "public\n")
    for path in (private, hidden):
        with pytest.raises(PermissionError):
            files.open(str(path), sources)
    with pytest.raises(PermissionError):
        files.listing(str(place / "hidden"), 10, sources)
    with pytest.raises(PermissionError):
        files.facts(str(place / "hidden"), ["readable.log"], sources)


@real_users
def test_root_in_a_container_can_name_public_files_and_its_own(place: Path, way: str) -> None:
    """Its own files are in the directory of its job. Elsewhere uid 0 gives no right."""
    files, sources = guarded(place, way, own_uid=0), sources_of(place, 0)
    own = file(place / "logs" / "job" / "more.log", "own\n", 0)
    public = file(directory(place / "bob", BOB) / "public.log", "public\n", BOB, 0o644)
    private = file(place / "bob" / "private.log", SECRET, BOB)
    of_root = file(place / "root.log", SECRET, 0)
    assert (content(files, own, sources), content(files, public, sources)) == ("own\n", "public\n")
    for path in (private, of_root):
        with pytest.raises(PermissionError):
            files.open(str(path), sources)


@real_users
def test_root_in_a_container_gains_nothing_by_changing_its_files_owner(place: Path, way: str) -> None:
    """It can give Bob the sources file in its own directory, where Bob could not have put it."""
    files = guarded(place, way, own_uid=0)
    attempt = directory(directory(place / "logs" / "job", 0) / "attempt-1", 0)
    sources = named_by(file(attempt / "sources-n1-0.json", "{}", BOB, 0o644))
    private = file(directory(place / "bob", BOB) / "private.log", SECRET, BOB)
    with pytest.raises(PermissionError):
        files.open(str(private), sources)
    assert content(files, file(place / "bob" / "public.log", "public\n", BOB, 0o644), sources) == "public\n"


@real_users
def test_a_pod_may_name_files_in_its_own_volumes(place: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet's directory of the pod decides; files of another pod are refused."""
    monkeypatch.setattr(guarded_files, "_POD_VOLUMES", f"{place}/pods")
    volumes = directory(place / "pods" / "uid-1" / "volumes", 0)
    sources = named_by(file(volumes / "sources-n1-0.json", "{}", 0))
    own = file(volumes / "x.log", "own\n", 0)
    foreign = file(directory(place / "pods" / "uid-10" / "volumes", 0) / "x.log", SECRET, 0)
    assert content(guarded(place, way, own_uid=0), own, sources) == "own\n"
    with pytest.raises(PermissionError):
        guarded(place, way, own_uid=0).open(str(foreign), sources)


@pytest.mark.skipif(not os.access(sys.executable, os.X_OK), reason="this user may not start Python")
def test_root_of_a_user_namespace_does_not_adopt_rights() -> None:
    """It may not become the node's users, so modes are compared, and the process goes on. Where no namespace can be
    had, the child says what this process says."""
    code = (
        "import ctypes, os; from pathlib import Path\n"
        "from trainmedic_agent.log_opening.thread_rights import ThreadRights\n"
        "libc, uid = ctypes.CDLL(None, use_errno=True), os.geteuid()\n"
        "is_apart = libc.unshare(0x10000000) == 0\n"
        "try: Path('/proc/self/uid_map').write_text(f'0 {uid} 1') if is_apart else None\n"
        "except OSError: pass\n"
        "print('namespace' if is_apart else 'none', ThreadRights().may_be_used())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    kind, may_be_used = done.stdout.split()
    assert may_be_used == str(MAY_TAKE and kind == "none")


@real_users
def test_a_name_from_another_users_file_needs_both_users_rights(place: Path, way: str) -> None:
    """Ann can have moved Bob's sources file into her own directory."""
    files = guarded(place, way)
    attempt = directory(directory(place / "logs" / "job", ANN) / "attempt-1", ANN)
    sources = named_by(file(attempt / "sources-n1-0.json", "{}", BOB, 0o644))
    private = file(directory(place / "bob", BOB) / "private.log", SECRET, BOB)
    public = file(place / "bob" / "public.log", "public\n", BOB, 0o644)
    with pytest.raises(PermissionError):
        files.open(str(private), sources)
    assert content(files, public, sources) == "public\n"


def test_a_name_counts_only_while_its_file_is_the_one_that_was_read(place: Path, way: str) -> None:
    """Another user's file under the same path gives none of that user's rights."""
    log = file(place / "x.log", "x\n")
    first = file(place / "sources.json", "{}")
    by = named_by(first)
    file(place / "other.json", "{}").replace(first)
    with pytest.raises(FileNotFoundError):
        guarded(place, way).open(str(log), by)


# --- what a user places -------------------------------------------------------------------------------------


@real_users
def test_a_file_in_a_jobs_directory_is_opened_as_its_owner(place: Path, way: str) -> None:
    """Bob's file in Ann's directory is not read if Ann may not read it; her own file is."""
    files, job = guarded(place, way), directory(place / "job", ANN, 0o700)
    assert content(files, file(job / "rank-0.jsonl", "ann\n", ANN)) == "ann\n"
    moved = file(place / "private.log", SECRET, BOB).rename(job / "rank-1.jsonl")
    with pytest.raises(PermissionError):
        files.open(str(moved))
    assert {entry.name for entry in files.listing(str(job), 10).entries} == {"rank-0.jsonl", "rank-1.jsonl"}


@real_users
def test_two_owners_on_a_path_must_both_be_able_to_traverse_it(place: Path, way: str) -> None:
    """If Bob's directory is in Ann's, Ann could have renamed it, and Bob could have moved something into it."""
    files, inner = guarded(place, way), directory(directory(place / "ann", ANN) / "bob", BOB)
    for owner in (ANN, BOB):
        with pytest.raises(PermissionError):
            files.open(str(file(inner / f"{owner}.log", SECRET, owner)))
    assert content(files, file(inner / "public.log", "public\n", BOB, 0o644)) == "public\n"


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_file_in_a_world_writable_directory_must_be_world_readable(place: Path, way: str, mode: int) -> None:
    """Any user can have moved an unreadable file there, also into a sticky directory."""
    files, shared = guarded(place, way), directory(place / "shared", mode=mode)
    with pytest.raises(PermissionError):
        files.open(str(file(shared / "private.log", SECRET)))
    assert content(files, file(shared / "public.log", "public\n", mode=0o644)) == "public\n"


@real_users
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2777])
def test_a_private_job_directory_in_a_world_writable_one_belongs_to_its_owner(place: Path, way: str, mode: int) -> None:
    """The SDK creates it for its user alone, and moving it there took its owner's rights."""
    files, shared = guarded(place, way), directory(place / "shared", mode=mode)
    for owner in (ANN, 0):
        job = directory(shared / f"job-{owner}", owner, 0o700)
        assert content(files, file(job / "x.log", "own\n", owner)) == "own\n"


@real_users
def test_a_user_who_may_write_in_anothers_directory_can_have_moved_a_file_there(place: Path, way: str) -> None:
    """In a sticky directory, the file would count as a job of that user."""
    files, moved = guarded(place, way), directory(place / "sticky", mode=0o1777) / "job"
    directory(directory(moved, BOB, 0o1775, TEAM) / "inner", BOB)
    with pytest.raises(PermissionError):
        files.open(str(file(moved / "inner" / "x.log", SECRET, BOB)))
    assert content(files, file(moved / "inner" / "team.log", "team\n", BOB, 0o640, TEAM)) == "team\n"


@real_users
def test_a_file_in_a_group_writable_directory_must_be_group_readable(place: Path, way: str) -> None:
    """A system group has no users, and counts as the administrator."""
    files = guarded(place, way)
    team = directory(place / "team", mode=0o2775, owner=0, group=TEAM)
    assert content(files, file(team / "x.log", "team\n", ANN, 0o640, TEAM)) == "team\n"
    with pytest.raises(PermissionError):
        files.open(str(file(team / "private.log", SECRET, BOB)))
    system = directory(place / "system", mode=0o775, owner=0, group=4)
    assert content(files, file(system / "kern.log", "kernel\n", 0, 0o640, 4)) == "kernel\n"


def test_a_users_own_group_does_not_count_as_shared() -> None:
    """Many distributions give each user a group with write access."""
    users = UserDatabase()
    assert users.is_shared(TEAM, ANN)
    assert not users.is_shared(0, 0)
    assert users.is_shared(100, 0)


def test_a_user_without_a_database_entry_has_no_group() -> None:
    """The group of the user's files may differ: a directory can pass on its own."""
    assert UserDatabase().rights_of(ANN) == Rights(ANN, 65534)
    assert 0 in UserDatabase().rights_of(0).groups


# --- links, pipes, devices ----------------------------------------------------------------------------------


def test_no_link_is_followed(place: Path, way: str) -> None:
    """This holds at the end and on the path, for symbolic and hard links."""
    files, target = guarded(place, way), file(directory(place / "target") / "x.log", SECRET)
    (place / "link.log").symlink_to(target)
    (place / "way").symlink_to(target.parent)
    (place / "hard.log").hardlink_to(target)
    for path, reason in (("link.log", UnreadReason.LINK), ("hard.log", UnreadReason.SECOND_NAME)):
        with pytest.raises(LogRefused) as refused:
            files.open(str(place / path))
        assert refused.value.reason is reason
    for path in (place / "way", place / "way" / "x.log"):
        with pytest.raises(NotADirectoryError):
            files.listing(str(path), 10)
    with pytest.raises(NotADirectoryError):
        files.open(str(place / "way" / "x.log"))


def test_only_regular_files_are_opened(place: Path, way: str) -> None:
    """Opening a pipe would wake its writer or block, and a device can act when it is opened."""
    os.mkfifo(place / "pipe.log")
    directory(place / "directory.log")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket.log"))
    files = GuardedFiles([str(place), "/dev"], switch=switch_of(way))
    for path in (*place.iterdir(), Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(LogRefused) as refused:
            files.open(str(path))
        assert refused.value.reason is UnreadReason.SPECIAL
    with pytest.raises(OSError) as unread:
        os.open(place / "pipe.log", os.O_WRONLY | os.O_NONBLOCK)
    assert unread.value.errno == errno.ENXIO, "nobody has the pipe open"


@pytest.mark.parametrize("path", ["/etc/passwd", "{}/../etc/passwd", "{}x/file", "relative", "", "{}/./x", "/"])
def test_only_files_that_the_policy_names_are_opened(place: Path, way: str, path: str) -> None:
    """A compromised client cannot open others."""
    files = guarded(place, way)
    for call in (files.open, lambda path: files.listing(path, 1), lambda path: files.facts(path, ["x"])):
        with pytest.raises(LogRefused) as refused:
            call(path.format(place))
        assert refused.value.reason is UnreadReason.OUTSIDE


def test_names_cannot_leave_a_directory(place: Path, way: str) -> None:
    """Facts are returned for directory entries only."""
    file(place / "x", "x\n")
    names = ["..", ".", "", "x/../x", "/etc/passwd", "x\0", "missing", "x"]
    facts = guarded(place, way).facts(str(place), names)
    assert [each is None for each in facts] == [True] * 7 + [False]


def test_an_access_control_list_is_not_derived_from_the_mode(place: Path) -> None:
    """Its entries can deny what the mode seems to grant."""
    path = file(place / "x.log", "x\n", mode=0o644)
    fd = os.open(path, os.O_PATH)
    try:
        assert not has_acl(fd)
        entries = [(1, 6, 2**32 - 1), (2, 0, ANN), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 4, 2**32 - 1)]
        raw = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        try:
            os.setxattr(path, "system.posix_acl_access", raw)
        except OSError:
            return  # this file system keeps none
        assert has_acl(fd)
        assert not Rights(ANN, 65534).may(os.R_OK, path.stat(), has_acl=True)
    finally:
        os.close(fd)


# --- races --------------------------------------------------------------------------------------------------


@real_users
def test_exchanging_files_during_opening_reveals_nothing_of_another_user(place: Path, way: str) -> None:
    """Ann keeps replacing her log by Bob's file or a link to it, and her directory by another one."""
    files, job = guarded(place, way), directory(directory(place / "ann", ANN) / "job", ANN)
    of_bob = directory(place / "bob", BOB, 0o700)
    secret = file(of_bob / "private.log", SECRET, BOB)
    file(of_bob / "x.log", SECRET, BOB)
    ended = threading.Event()

    def exchange() -> None:
        own, other = place / "own", job / "other"
        while not ended.is_set():
            file(own, "ann\n", ANN).rename(job / "x.log")
            other.symlink_to(secret)
            other.rename(job / "x.log")
            file(own, SECRET, BOB).rename(job / "x.log")
            job.rename(place / "ann" / "aside")
            of_bob.rename(job)
            job.rename(of_bob)
            (place / "ann" / "aside").rename(job)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(2000):
            try:
                text = content(files, job / "x.log")
            except (OSError, LogRefused):
                continue
            assert text == "ann\n"
    finally:
        ended.set()
        thread.join()


@pytest.mark.skipif(not MAY_TAKE, reason="users' rights take CAP_SETUID and CAP_SETGID")
def test_only_one_thread_adopts_another_users_rights() -> None:
    """Other threads keep theirs, and the thread gets its own back afterwards, also after an error."""
    rights, switch = Rights(ANN, TEAM, (TEAM, 20_200)), ThreadRights()

    def ids() -> dict[str, str]:
        lines = Path("/proc/thread-self/status").read_text().splitlines()
        return dict(line.split(":\t", 1) for line in lines if line.startswith(("Uid", "Gid", "Groups", "CapEff")))

    own, taken, meeting = ids(), [], threading.Barrier(2)

    def act() -> None:
        with switch.using(rights):
            meeting.wait(60)
            taken.append(ids())
            meeting.wait(60)
        taken.append(ids())

    thread = threading.Thread(target=act)
    thread.start()
    meeting.wait(60)
    assert ids() == own
    meeting.wait(60)
    thread.join()
    euid = str(os.geteuid())
    assert (taken[0]["Uid"].split()[1], taken[0]["Uid"].split()[3], taken[0]["Gid"].split()[3]) == (
        euid,
        str(ANN),
        str(TEAM),
    )
    assert taken[0]["Groups"].split() == [str(TEAM), "20200"]
    assert int(taken[0]["CapEff"], 16) == 1 << 6 | 1 << 7
    assert taken[1] == own
    with pytest.raises(ZeroDivisionError), switch.using(rights):
        raise ZeroDivisionError
    assert ids() == own


@real_users
@pytest.mark.skipif(not MAY_TAKE, reason="users' rights take CAP_SETUID and CAP_SETGID")
def test_a_server_that_distrusts_root_serves_the_owner(place: Path) -> None:
    """NFS with root_squash does this: the test uses a thread without the capabilities by which root reads all."""
    private = file(directory(place / "ann", ANN, 0o700) / "x.log", "ann\n", ANN)
    outcome: list[str] = []

    def act() -> None:
        switch = ThreadRights()
        values = switch._capabilities()
        switch._set_capabilities([values[0] & ~0b110, *values[1:]])
        try:
            os.close(os.open(private, os.O_RDONLY))
        except PermissionError:
            outcome.append("refused to root")
        outcome.append(content(GuardedFiles([str(place)], switch=switch), private))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert outcome == ["refused to root", "ann\n"]


def test_the_test_directory_itself_is_accessible(place: Path) -> None:
    """Otherwise a refusal would prove nothing about rights."""
    assert all(parent.stat().st_mode & stat.S_IXOTH for parent in (place, *place.parents))
