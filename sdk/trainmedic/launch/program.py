from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
from pathlib import Path
from typing import Sequence

from trainmedic.launch import guard
from trainmedic.launch.command_line import LaunchLine
from trainmedic.launch.membership import NodeExclusions
from trainmedic.launch.server_link import open_link
from trainmedic.launch.supervisor import LaunchOptions, Supervisor, log_to_stderr
from trainmedic.settings import LOG_DIR
from trainmedic.version import __version__

log = logging.getLogger("trainmedic")

_DESCRIPTION = """\
Starts a training job with the command after --, forwards its output, and restarts it after failures. The job itself
resumes from its newest checkpoint (Run.resume, or its framework's own way). Reports each attempt to the server.
"""
_EPILOG = """\
examples:
  trainmedic-run --job llm-1 -- torchrun --nproc-per-node 8 train.py
  trainmedic-run --job llm-1 --retries 5 --delay 2m -- accelerate launch train.py
  trainmedic-run -- srun python train.py

The exit code is that of the last attempt; 128 plus the number of the signal that ended it, 127 if the command cannot be
started, 2 for invalid options. TRAINMEDIC_ATTEMPT is the number of the attempt, from 1. SIGTERM, SIGINT, SIGHUP and
SIGQUIT go to the command, and no other attempt follows. SIGUSR1 and SIGUSR2 go to the processes of the job that handle
them, and the job continues.
"""
_TIME = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|d|)$")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"^(\d+)([KMG]?)(?:i?B)?$")
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _seconds(text: str) -> float:
    match = _TIME.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; use 90s, 2m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def _seconds_or_never(text: str) -> float | None:
    return None if text == "never" else _seconds(text)


def _bytes(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use 64M or 1G")
    return int(match[1]) * _SIZES[match[2]]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; use 0 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="trainmedic-run",
        usage="trainmedic-run [options] -- command [arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--job", metavar="NAME", help="name of the job in its alerts (default: TRAINMEDIC_JOB)")
    add(
        "--retries",
        metavar="N",
        type=_count,
        default=3,
        help="restarts after failures without progress (a later checkpoint or step); progress restarts the count. "
        "Three equal failures in a row without progress end it sooner (default: 3)",
    )
    add("--delay", metavar="TIME", type=_seconds, default=60.0, help="wait before the next attempt (default: 60s)")
    add(
        "--grace",
        metavar="TIME",
        type=_seconds,
        default=30.0,
        help="time from the signal that ends the job to SIGKILL (default: 30s)",
    )
    add(
        "--hang-after",
        metavar="TIME",
        type=_seconds_or_never,
        default=600.0,
        help="end an attempt that hangs this much longer than the job's own limit; or never (default: 10m)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="directory for output, records and exit statuses, by job and attempt; none to store nothing (default: "
        "TRAINMEDIC_LOG_DIR, else trainmedic-logs)",
    )
    most = "maximum stored size of each output (default: 64M)"
    add("--log-size", metavar="SIZE", type=_bytes, default=64 << 20, help=most)
    merged = "do not let torchrun store each rank's output (by its --tee and --log-dir)"
    add("--no-rank-logs", action="store_true", help=merged)
    add(
        "--tty",
        action="store_true",
        help="make the job's standard output and standard error terminals, so that it prints colours and progress bars",
    )
    add(
        "--warm",
        action="store_true",
        help="import PyTorch once for all ranks of an attempt, in advance for the next one, so that attempts begin "
        "sooner; torchrun only, uses the memory of one more process",
    )
    add("--min-nodes", metavar="N", type=_count, help="minimum nodes of an elastic torchrun (default: 1)")
    add("--max-nodes", metavar="N", type=_count, help="maximum nodes; makes torchrun elastic")
    add("--version", action="version", version=f"trainmedic-run {__version__}")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:place], arguments[place + 1 :]
    options = parser().parse_args(own)
    if not command:
        parser().error("no command; put it after --, such as: trainmedic-run -- torchrun train.py")
    log_to_stderr()
    guard.set_subreaper()
    line = LaunchLine.of(command)
    if options.warm and line.interpreter is None:
        log.warning("--warm has no effect: %s is not a torchrun whose Python can be found", command[0])
    nodes = _bounds(options, line)
    node = re.sub(r"[/\s]", "-", os.environ.get("TRAINMEDIC_NODE") or socket.gethostname())
    membership = NodeExclusions(node, line.starts_all_nodes, line.why_no_node_excludable)
    bounds = {} if nodes is None else {"min_nodes": nodes[0], "max_nodes": nodes[1]}
    link = open_link(options.job, membership, bounds, reports_ends=nodes is None and not line.is_one_of_several)
    launch = LaunchOptions(
        line=line,
        retries=options.retries,
        delay=options.delay,
        grace=options.grace,
        hang_after=options.hang_after,
        job=options.job or os.environ.get("TRAINMEDIC_JOB") or "job",
        log_dir=_log_dir(options.log_dir),
        most_output=options.log_size,
        keeps_ranks=not options.no_rank_logs,
        nodes=nodes,
        prints_to_terminal=options.tty,
        is_warm=options.warm,
    )
    if options.job:
        os.environ["TRAINMEDIC_JOB"] = options.job
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # keep the output of processes that are killed
    try:
        return Supervisor(launch, membership, link).run()
    finally:
        if link is not None:
            link.close()


def _bounds(options: argparse.Namespace, line: LaunchLine) -> tuple[int, int] | None:
    least, most = options.min_nodes, options.max_nodes
    if least is None and most is None:
        return None
    least = 1 if least is None else least
    if most is None or not 1 <= least <= most:
        parser().error("--max-nodes is required; use at least --min-nodes, which must be 1 or more")
    if not line.can_be_elastic:
        parser().error("--min-nodes and --max-nodes need a torchrun without its own --nnodes")
    return least, most


def _log_dir(given: Path | None) -> Path | None:
    directory = str(given) if given is not None else os.environ.get(LOG_DIR) or "trainmedic-logs"
    return None if directory == "none" else Path(directory).absolute()
