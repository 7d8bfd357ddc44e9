"""Start of ``trainmedic-probe``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

from trainmedic.errors import ConfigurationError
from trainmedic.version import __version__

OK, BAD, WRONG_USE, FAILED, TRAINS = 0, 1, 2, 3, 4  # exit codes
MOST_RANKS = 64

_DESCRIPTION = """\
Measure how fast ranks communicate: barriers, and all-reduces of 1, 10 and 100 MB, among all ranks, within each node
and between each two nodes. Under torchrun it measures torchrun's nodes, otherwise the GPUs of this machine (or ranks on
its CPUs). Use it only on nodes that do not train.
"""
_EPILOG = """\
examples:
  trainmedic-probe                                                  the GPUs of this node
  trainmedic-probe --ranks 4 --backend gloo                         four ranks on the CPUs of this machine
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node-1:29400 \\
      -m trainmedic.probe --baselines /shared/probe.json            two nodes, compared with earlier results

Exit codes: 0 good (or no baseline yet), 1 slow or wrong, 2 invalid option or unusable file, 3 measurement failed, 4 a
training runs on these nodes, or the server cannot confirm that none does.
"""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        "trainmedic-probe", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    add = options.add_argument
    add("--ranks", type=int, metavar="N", help="ranks to start here; default: one per GPU, else 2")
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl if there are GPUs")
    add("--barriers", type=int, default=10, metavar="N", help="barriers to measure (10)")
    add("--sizes", type=_sizes, default=(1.0, 10.0, 100.0), metavar="MB", help="sizes of the all-reduces (1,10,100)")
    add("--memory", type=float, metavar="PERCENT", help="share of each GPU's free memory to test; on CPUs 256 MB")
    add("--baselines", type=Path, metavar="FILE", help="earlier results of each pair; updated")
    add("--least-bandwidth", type=float, metavar="GB/S", help="minimum for the largest all-reduce of each pair")
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one operation (120)")
    add(
        "--server",
        default=os.environ.get("TRAINMEDIC_URL"),
        metavar="URL",
        help="Trainmedic server to ask which nodes train",
    )
    add("--even-if-training", action="store_true", help="measure although a training runs there")
    add("--output", choices=["text", "json"], default="text")
    add("--version", action="version", version=__version__)
    return options


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    read = parser()
    options = read.parse_args(arguments)
    least = _least_ranks(options)
    if options.ranks is not None and not least <= options.ranks <= MOST_RANKS:
        read.error(f"--ranks must be from {least} to {MOST_RANKS}")
    if options.memory is not None and not 0 < options.memory <= 90:
        read.error("--memory must be above 0, and at most 90 percent")
    if not 1 <= options.barriers <= 10_000:
        read.error("--barriers must be from 1 to 10000")
    if options.least_bandwidth is not None and not 0 < options.least_bandwidth < math.inf:
        read.error("--least-bandwidth must be above 0, and finite")
    if not 0 < options.timeout <= 3600:
        read.error("--timeout must be above 0, and at most 3600 seconds")
    return options


def _least_ranks(options: argparse.Namespace) -> int:
    """Return 1 for a test of memory, which needs no other rank."""
    return 2 if options.memory is None else 1


def _sizes(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size <= 16_384 for size in sizes):
        raise argparse.ArgumentTypeError("sizes are in megabytes, above 0 and at most 16384, such as 1,10,100")
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    if importlib.util.find_spec("torch") is None:
        print("trainmedic-probe: PyTorch is not installed here", file=sys.stderr)
        return FAILED
    try:
        token = _token(options)
    except ConfigurationError as error:
        print(f"trainmedic-probe: {error}", file=sys.stderr)
        return WRONG_USE
    if "RANK" not in os.environ:
        return _start_ranks(options, given)
    return _run_rank(options, token)


def _start_ranks(options: argparse.Namespace, given: Sequence[str]) -> int:
    # Imported late, so that --help does not wait for PyTorch.
    import torch

    from trainmedic.probe import local_ranks

    gpus = torch.cuda.device_count() if options.backend != "gloo" else 0
    if options.backend == "nccl" and gpus == 0:
        print("trainmedic-probe: no GPU is visible here", file=sys.stderr)
        return FAILED
    ranks = options.ranks or gpus or 2
    if gpus and not _least_ranks(options) <= ranks <= gpus:
        print(
            f"trainmedic-probe: {gpus} GPU(s) are visible here for {ranks} rank(s); NCCL needs one each: "
            "use --ranks or --backend gloo",
            file=sys.stderr,
        )
        return FAILED
    return local_ranks.run(ranks, given)


def _run_rank(options: argparse.Namespace, token: str | None) -> int:
    from trainmedic.probe.measuring import ProbeSizes
    from trainmedic.probe.running import NodesTrain, ProbeOptions, probe

    is_first = os.environ["RANK"] == "0"
    wanted = ProbeOptions(
        sizes=ProbeSizes(options.barriers, options.sizes),
        backend=options.backend,
        timeout=options.timeout,
        baselines=options.baselines,
        least_bytes_per_s=None if options.least_bandwidth is None else options.least_bandwidth * 1e9,
        even_if_training=options.even_if_training,
        memory_percent=options.memory,
        server=options.server or None,
        token=token,
    )
    try:
        document = probe(wanted)
    except NodesTrain as error:
        if is_first:
            print(f"trainmedic-probe: not measured: {error}", file=sys.stderr)
            print("Use --even-if-training to measure anyway.", file=sys.stderr)
        return TRAINS
    except ConfigurationError as error:
        print(f"trainmedic-probe: {error}", file=sys.stderr)
        return WRONG_USE
    except (RuntimeError, ValueError) as error:  # torch.distributed: missing or silent ranks
        print(f"trainmedic-probe: rank {os.environ['RANK']}: cannot measure: {error}", file=sys.stderr)
        return FAILED
    if document is None:
        return OK
    print(json.dumps(document, indent=2) if options.output == "json" else "\n".join(_lines(document)))
    return BAD if document["judgement"] in ("slow", "wrong") else OK


def _token(options: argparse.Namespace) -> str | None:
    """Raises ConfigurationError."""
    if not options.server or options.even_if_training or os.environ.get("RANK", "0") != "0":
        return None  # this process asks no server
    file = os.environ.get("TRAINMEDIC_TOKEN_FILE")
    try:
        given = Path(file).read_text(encoding="utf-8") if file else os.environ.get("TRAINMEDIC_TOKEN", "")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(
            f"TRAINMEDIC_TOKEN_FILE: cannot read {file}: {reason}; name a readable file with the token, or unset it"
        ) from error
    token = given.strip()
    if not (token.isascii() and token.isprintable()):  # the error of http.client would show it
        name = "TRAINMEDIC_TOKEN_FILE" if file else "TRAINMEDIC_TOKEN"
        raise ConfigurationError(f"{name}: not a token: it has line feeds, or characters other than ASCII")
    return token or None


def _lines(document: Mapping[str, Any]) -> list[str]:
    nodes = ", ".join(f"{node} ({ranks})" for node, ranks in document["nodes"].items())
    lines = [f"{document['backend']} on {document['device']}: {nodes}", f"all ranks: {_figures(document['all'])}"]
    for test in document["memory"]:
        result = "correct" if test["is_right"] else "wrong"
        lines.append(
            f"memory of rank {test['rank']} on {test['node']}: {test['bytes'] / 1e9:.3g} GB at "
            f"{test['bytes_per_s'] / 1e9:.3g} GB/s: {result}"
        )
    for pair in document["pairs"]:
        first, second = pair["nodes"]
        name = f"within {first}" if first == second else f"{first} - {second}"
        lines.append(f"{name}: {_figures(pair)}: {pair['judgement']}")
        lines += [f"  {reason}" for reason in pair["reasons"]]
    return lines


def _figures(measured: Mapping[str, Any]) -> str:
    rates = ", ".join(
        f"{each['bytes'] / 1e6:g} MB at {each['bytes_per_s'] / 1e9:.3g} GB/s" for each in measured["all_reduce"]
    )
    return f"barrier {measured['barrier']['mean'] * 1e6:.0f} µs, all-reduce {rates}"


if __name__ == "__main__":
    sys.exit(main())
