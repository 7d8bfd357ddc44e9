"""srun's ``--exclude``, of which each component's last one counts."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

_EXCLUDE, _SHORTEST = "--exclude", "--exclud"  # a shorter form could be --exclusive
# Options without a value in a word of its own.
_FLAGS = frozenset(
    {
        *("--async", "--bcast", "--compress", "--consolidate-segments", "--contiguous", "--debugger-test"),
        *("--disable-status", "--exact", "--exclusive", "--external-launcher", "--help", "--hold", "--immediate"),
        *("--interactive", "--kill-on-bad-exit", "--label", "--multi-prog", "--nice", "--no-allocate", "--no-kill"),
        *("--oom-kill-step", "--overcommit", "--overlap", "--oversubscribe", "--parsable", "--preserve-env"),
        *("--propagate", "--pty", "--quiet", "--quit-on-interrupt", "--reboot", "--resv-ports", "--send-libs"),
        *("--spread-job", "--spread-segments", "--stepmgr", "--test-only", "--unbuffered", "--usage"),
        *("--use-min-nodes", "--verbose", "--version", "--wait-for-children", "--whole", "--x11"),
        # The plugin pyxis.
        *("--container-mount-home", "--no-container-mount-home", "--container-remap-root"),
        *("--no-container-remap-root", "--container-entrypoint", "--no-container-entrypoint"),
        *("--container-entrypoint-log", "--container-readonly", "--container-writable"),
    }
)
_VALUED = frozenset(
    {
        *("--accel-bind", "--account", "--acctg-freq", "--bb", "--bbf", "--bcast-exclude", "--begin", "--chdir"),
        *("--cluster-constraint", "--clusters", "--comment", "--constraint", "--container", "--container-id"),
        *("--core-spec", "--cores-per-socket", "--cpu-bind", "--cpu-freq", "--cpus-per-gpu", "--cpus-per-task"),
        *("--deadline", "--delay-boot", "--dependency", "--distribution", "--epilog", "--error", "--exclude"),
        *("--export", "--export-file", "--extra", "--extra-node-info", "--gid", "--gpu-bind", "--gpu-freq", "--gpus"),
        *("--gpus-per-node", "--gpus-per-socket", "--gpus-per-task", "--gres", "--gres-flags", "--het-group"),
        *("--hint", "--input", "--job-name", "--jobid", "--licenses", "--mail-type", "--mail-user", "--mcs-label"),
        *("--mem", "--mem-bind", "--mem-per-cpu", "--mem-per-gpu", "--mincpus", "--mpi", "--msg-timeout"),
        *("--network", "--nodefile", "--nodelist", "--nodes", "--ntasks", "--ntasks-per-core", "--ntasks-per-gpu"),
        *("--ntasks-per-node", "--ntasks-per-socket", "--ntasks-per-tres", "--open-mode", "--output", "--pack-group"),
        *("--partition", "--power", "--prefer", "--priority", "--profile", "--prolog", "--qos", "--relative"),
        *("--reservation", "--segment", "--signal", "--slurmd-debug", "--sockets-per-node", "--switches"),
        *("--task-epilog", "--task-prolog", "--tasks-per-node", "--thread-spec", "--threads", "--threads-per-core"),
        *("--time", "--time-min", "--tmp", "--tree-width", "--treewidth", "--tres-bind", "--tres-per-job"),
        *("--tres-per-task", "--uid", "--wait", "--wckey"),
        # The plugin pyxis.
        *("--container-env", "--container-image", "--container-mounts", "--container-name", "--container-save"),
        *("--container-workdir"),
    }
)
_PREFIXES_OF_FLAGS = frozenset({"--wait", "--container"})  # options with a value; some flags begin with their names
_SHORT_FLAGS = frozenset("EHOQVXZhlsuv")
_SHORT_WITH_OPTIONAL = frozenset("IKk")  # the value is the rest of the word
_SEPARATOR = ":"  # of components


class _Exclusion(NamedTuple):
    word: int  # index of the word with the value
    start: int  # of the value in the word
    after: str  # unknown option, followed by its value or the program; "" without one


def with_excluded(argv: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Exclude ``nodes`` too."""
    changed = list(argv)
    for begin, exclusion in reversed(list(_components(argv))):
        if exclusion is None:
            changed.insert(begin, f"{_EXCLUDE}={','.join(nodes)}")
        else:
            word = changed[exclusion.word]
            changed[exclusion.word] = f"{word}{',' if word[exclusion.start :] else ''}{','.join(nodes)}"
    return changed


def why_not_excludable(argv: Sequence[str]) -> str:
    """Return why `with_excluded` has no effect, or ""."""
    for _, exclusion in _components(argv):
        if exclusion is not None and exclusion.after:
            return (
                f"srun's option {exclusion.after} is unknown, so --exclude may be srun's or the program's; write "
                f"{exclusion.after}=VALUE, or put a flag before another option"
            )
        if exclusion is not None and "/" in argv[exclusion.word][exclusion.start :]:
            return "srun's own --exclude names a file, to which no node can be added; name the nodes instead"
    return ""


def _components(argv: Sequence[str]) -> Iterator[tuple[int, _Exclusion | None]]:
    # Each component's first index, and its last exclusion.
    begin = 1
    while True:
        exclusion, program = _options(argv, begin)
        yield begin, exclusion
        try:
            begin = argv.index(_SEPARATOR, program) + 1
        except ValueError:
            return


def _options(argv: Sequence[str], begin: int) -> tuple[_Exclusion | None, int]:
    # The last exclusion, and the program's index.
    found: _Exclusion | None = None
    place, unknown = begin, ""
    while place < len(argv) and argv[place].startswith("-") and argv[place] not in ("-", "--"):
        word = argv[place]
        name, at = _valued(word)  # at: of the value; 0 without one in this word
        has_next = bool(name) and not at and place + 1 < len(argv)
        if name.startswith("--") and has_next and argv[place + 1].startswith("-"):
            has_next = False  # a plugin's flag
        if name == _EXCLUDE and (at or has_next):
            found = _Exclusion(place, at, unknown) if at else _Exclusion(place + 1, 0, unknown)
        if name.startswith("--") and has_next and not any(known.startswith(name) for known in _VALUED):
            unknown = unknown or name
        place += 2 if has_next else 1
    return found, place


def _valued(word: str) -> tuple[str, int]:
    # The name of the option whose value follows ("" for flags), and the value's start in the word.
    if word.startswith("--"):
        name, equals, _ = word.partition("=")
        if name.startswith(_SHORTEST) and _EXCLUDE.startswith(name):
            name = _EXCLUDE
        is_flag = name not in _PREFIXES_OF_FLAGS and any(flag.startswith(name) for flag in _FLAGS)
        return ("" if is_flag else name), (word.index("=") + 1 if equals else 0)
    for index, letter in enumerate(word[1:], 1):
        if letter in _SHORT_WITH_OPTIONAL:
            break
        if letter not in _SHORT_FLAGS:
            return (_EXCLUDE if letter == "x" else letter), (index + 1 if index + 1 < len(word) else 0)
    return "", 0
