"""The arms, and what came of them.

python -m benchmarks.unattended              about three quarters of an hour
python -m benchmarks.unattended --short      three faults in three quarters of a minute
python -m benchmarks.unattended --beside REVISION --faults 20 --kinds "rank killed" …
                                            the seconds of another revision and of this one, in turns

Without root, omit ``full disk`` or use ``unshare --map-root-user --mount``.

A small transformer is trained with DistributedDataParallel over gloo: four ranks on two loopback nodes, each started by
``trainmedic-run -- torchrun``. Checkpoints: in memory every two steps, copied to the other node; on disk every fifty.
Prometheus, Alertmanager and the server use the shipped files, except:

- Durations of rules, playbooks and configurations, and the launcher's ``--delay`` and ``--grace``, are divided by 30.
  ``--hang-after`` is 2 minutes.
- Playbooks may run 40 times a day.
- ``training-straggler`` restarts the processes of the slow node.
- In-memory checkpoints may cost a tenth of a step (``Memory(share=0.1)``).

The kinds of faults:

- poisoned batches: labels of 100 batches are noise whenever drawn
- learning-rate jump: rate times 30
- gradient explosion: gradients of 100 steps are large noise
- NaN: losses of 3 batches are NaN whenever drawn
- silent corruption: one bit of one rank's weight flips
- rank killed, node killed: SIGKILL to one rank; to all of a node, whose shared memory is emptied
- out of memory, hang: an allocation fails; one rank never reaches its step
- corrupt checkpoint: the newest is changed, in memory or on disk, and a rank killed
- slow rank: each step of a rank takes 60 ms or 1.2 times longer
- full disk: the checkpoints' file system is full for 6 s
- server killed, Redis killed: SIGKILL during a repair

A fault is repaired if its playbooks ended well, or the job restarted from a checkpoint (full disk: wrote a later one),
and the ranks' weights are bitwise equal before the next fault. Steps lost were done twice. Seconds lost are the time
between faults minus the last execution of each step. The effective training time ratio divides the time of the steps'
last executions by the total. The report also has the median seconds of each phase of a restart: notice, end of the
attempt, wait, launch, imports, join of the process group, build, load, first step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.unattended import arms, beside, durations, faults, phases
from benchmarks.unattended.arms import ALONE, CALM, MEDIC, Arm, Plan
from benchmarks.unattended.phases import Account

SHORT = Plan(
    steps=400,
    pace=0.05,
    faster=30,
    checkpoint_every=50,
    seed=0,
    faults=faults.plan(3, 400, seed=0, kinds=[faults.NAN, faults.RATE, faults.KILL_RANK]),
)


def report(plan: Plan, found: arms.Arms) -> str:
    medic = found.by_name[MEDIC]
    started = medic.only("started")
    assert started is not None
    told = phases.accounts(medic.events, medic.executions, found.runs)
    lines = [
        f"{plan.steps} steps on {faults.RANKS} ranks, {len(plan.faults)} faults of "
        f"{len({fault.kind for fault in plan.faults})} kinds, a checkpoint every {plan.checkpoint_every} steps, text "
        f"{started['digest']}; durations of rules, playbooks and launcher divided by {plan.faster}",
        *("", *_arms(plan, found)),
        *("", *_each([one for one in told if one.kind not in faults.ENDING], phases.PHASES)),
        *("", *_each([one for one in told if one.kind in faults.ENDING], phases.RESTART_PHASES)),
        *("", *_kinds(told)),
        *("", "median seconds of each phase", *durations.tables(told)),
        *("", *_sums(plan, told, medic)),
        *(f"besides: {count} x {what}" for what, count in Counter(phases.besides(found.runs)).items()),
    ]
    return "\n".join(lines)


def _arms(plan: Plan, found: arms.Arms) -> list[str]:
    calm, alone, medic = (found.by_name[name] for name in (CALM, ALONE, MEDIC))
    end, calm_end = medic.only("finished"), calm.only("finished")
    assert calm_end is not None
    calm_loss = calm_end["validation"]
    learnt = f"DID NOT COME TO ITS END: {found.failure}"
    if end is not None:
        learnt = f"validation loss {end['validation']:.4f} ({(end['validation'] / calm_loss - 1) * 100:+.2f} %)"
    stopped = alone.executions[-1].step if alone.executions else 0
    numbers = alone.only("nan")
    without = f", without a number since step {numbers['step']}" if numbers else ""
    return [
        f"calm:  validation loss {calm_loss:.4f}",
        f"alone: ended or hung at step {stopped} of {plan.steps}{without}",
        f"medic: {learnt}",
    ]


def _each(told: Sequence[Account], columns: Sequence[str]) -> list[str]:
    head = "".join(f"{phase:>9}" for phase in columns)
    lines = [f"fault                        step  {head}  steps lost, good  seconds  repaired by"]
    for one in told:
        times = "".join(f"{one.seconds[p]:9.2f}" if p in one.seconds else "        -" for p in columns)
        how = "; ".join(one.repairs) or "nothing"
        notes = f"{'' if one.is_repaired else '  NOT REPAIRED'}{'  (people were told)' if one.told_people else ''}"
        lost = f"{one.steps_lost:12}{one.good_steps_lost:6}{one.seconds_lost:9.1f}"
        lines.append(f"{one.number:3} {one.kind:22} {one.step:6}  {times}{lost}  {how}{notes}")
    return lines


def _kinds(told: Sequence[Account]) -> list[str]:
    """Return by kind the number, repaired ones, and medians and worst of the costs."""
    lines = [
        "                                              steps lost       good steps lost  seconds lost   to good step",
        "kind                  number  repaired  told  median  worst     median  worst    median  worst  median  worst",
    ]
    for kind in sorted({one.kind for one in told}, key=faults.KINDS.index):
        mine = [one for one in told if one.kind == kind]
        lines.append(f"{kind:22}{_row(mine)}")
    return [*lines, f"{'all':22}{_row(told)}"]


def _row(told: Sequence[Account]) -> str:
    counts = f"{len(told):6}{sum(one.is_repaired for one in told):10}{sum(one.told_people for one in told):6}"
    steps, good = [one.steps_lost for one in told], [one.good_steps_lost for one in told]
    seconds = [one.seconds_lost for one in told]
    costs = f"{statistics.median(steps):8g}{max(steps):7}{statistics.median(good):11g}{max(good):7}"
    until_good = [one.seconds_to_good for one in told if one.seconds_to_good is not None]
    good_step = f"{statistics.median(until_good):9.1f}{max(until_good):7.1f}" if until_good else f"{'-':>9}{'-':>7}"
    return f"{counts}{costs}{statistics.median(seconds):10.1f}{max(seconds):7.1f}{good_step}"


def _sums(plan: Plan, told: Sequence[Account], medic: Arm) -> list[str]:
    alone = sum(one.is_repaired and not one.told_people for one in told)
    lost = statistics.mean(one.seconds_lost for one in told)
    ratio = phases.effective(medic.executions)
    minutes = (medic.executions[-1].ended - medic.executions[0].began) / 60
    agreement = "agree" if (medic.only("finished") or {}).get("agree") else "DO NOT AGREE"
    return [
        f"{sum(one.is_repaired for one in told)} of {len(plan.faults)} repaired, {alone} of them without a message "
        f"about the fault itself; the ranks {agreement} at the end",
        f"effective training time {ratio:.3f}: of {minutes:.1f} minutes from the first step to the last, the part in "
        "steps that count, each in its last execution",
        f"a fault costs {lost:.1f} s on average; {1 - lost / 3600:.4f} with one an hour at that price, 0.95 with one "
        f"every {lost / 0.05:.0f} s or more",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="three faults in three quarters of a minute")
    parser.add_argument("--faults", type=int, default=100, metavar="COUNT")
    parser.add_argument("--steps", type=int, help="of the run (default: 300 for each fault, and 700)")
    parser.add_argument("--kinds", nargs="+", default=faults.KINDS, metavar="KIND", help="only these")
    parser.add_argument("--pace", type=float, default=0.05, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--faster", type=int, default=30, help="what durations of rules and playbooks are divided by")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--beside", metavar="REVISION", help="only measure seconds, those of this revision too, in turns"
    )
    parser.add_argument("--directory", type=Path, help="where logs are left (default: a temporary one)")
    return parser.parse_args()


def planned(options: argparse.Namespace) -> Plan:
    if options.short:
        return SHORT
    steps = options.steps or 300 * options.faults + 700
    coming = faults.plan(options.faults, steps, options.seed, options.kinds)
    return Plan(steps, options.pace, options.faster, options.checkpoint_every, options.seed, coming)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="unattended-") as temporary:
        directory = (options.directory or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        plan = planned(options)
        if options.beside:
            print(beside.compare(directory, plan, options.beside))
        else:
            print(report(plan, arms.run(directory, plan)))
        print(f"took {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
