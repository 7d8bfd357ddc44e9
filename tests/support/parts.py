"""The two parts of the tests: the quick one, which every change needs, and the rest.

The rest needs downloads that few changes are about, or takes minutes. A file, a folder or a test (`file::test`) that
`REST` names belongs to it; all else is quick. ``tests/conftest.py`` applies this where ``--part`` is given, as
``scripts/test`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum


class Part(StrEnum):
    """A part of the tests."""

    QUICK = "quick"
    REST = "rest"


REST: Mapping[str, Sequence[str]] = {
    "DeepSpeed, Megatron-LM and torchtitan": (
        "tests/integration/engines",
        "tests/integration/test_sharded_waits.py",
    ),
    "TRL": ("tests/integration/frameworks/test_buffering_trainers.py",),
    "public training scripts": ("tests/acceptance/upstream",),
    "a browser (Chromium)": (
        "tests/integration/server/test_behind_a_proxy.py",
        "tests/integration/server/test_console_in_a_browser.py",
        "tests/integration/server/test_console_with_real_names.py",
    ),
    "a real Slurm (mmdebstrap)": (
        "tests/contract/test_slurm.py",
        "tests/integration/server/test_slurm.py",
        "tests/integration/server/test_slurm_agent.py",
        "tests/integration/server/test_slurm_repair.py",
        "tests/integration/test_slurm_actions.py",
        "tests/integration/test_slurm_scripts.py",
    ),
    "a container engine (dockerd)": (
        "tests/integration/agent/test_container_leftovers.py",
        "tests/integration/agent/test_container_restart.py",
    ),
    "trainings of several ranks": (
        "tests/integration/frameworks/test_lightning_ranks.py",
        "tests/integration/frameworks/test_ranks.py",
        "tests/integration/frameworks/test_step_signals.py",
        "tests/integration/launch/test_elastic.py",
        "tests/integration/launch/test_outcomes.py",
        "tests/integration/launch/test_torchrun.py",
        "tests/integration/plain_torch/test_accelerate_ranks.py",
        "tests/integration/plain_torch/test_memory_ranks.py",
        "tests/integration/plain_torch/test_rank_states.py",
        "tests/integration/plain_torch/test_ranks.py",
        "tests/integration/plain_torch/test_slow_rank.py",
        "tests/integration/test_ranks_agree.py",
    ),
    "the details of Hugging Face's Trainer and Lightning": (
        "tests/integration/frameworks/test_earlier_trainings.py",
        "tests/integration/frameworks/test_inside_others.py",
        "tests/integration/frameworks/test_lightning_data.py",
        "tests/integration/frameworks/test_losses_compared.py",
        "tests/integration/frameworks/test_unusual_settings.py",
        "tests/integration/frameworks/test_verified.py",
    ),
    "random trainings, and long ones": (
        "tests/integration/plain_torch/truth",
        "tests/integration/plain_torch/test_rollout_engine.py",
        "tests/integration/test_sdk_soak.py",
    ),
    "warm starts": ("tests/integration/launch/test_warm.py",),
    "jobs that fail": (
        "tests/integration/diagnosis",
        "tests/integration/test_report_verdicts.py",
    ),
    "the examples of the documentation": (
        "tests/integration/test_documentation.py::test_what_a_page_shows_is_what_happens",
        "tests/integration/test_on_call.py",
        "tests/acceptance/test_demo.py",
        "tests/acceptance/test_example_job.py",
        "tests/acceptance/test_loss_spike.py",
    ),
    "long stories of an agent": (
        "tests/integration/agent/test_log_reader_process.py::test_commands_do_not_notice_that_the_reader_is_gone",
        "tests/integration/agent/test_log_reading.py::test_an_agent_killed_at_random_loses_no_line_and_repeats_none",
        "tests/integration/agent/test_log_shipping.py::test_a_server_finds_each_line_once_whatever_was_killed",
        "tests/integration/agent/test_logs_to_alerts.py",
        "tests/integration/agent/test_node_health.py::test_a_load_test_measures_memory_and_links",
        "tests/integration/test_log_search.py::test_lines_of_six_formats_have_their_time_while_a_process_prints_them",
    ),
    "long stories of a server": (
        "tests/integration/test_forged_messages.py::test_a_forged_note_is_no_outcome",
        "tests/integration/test_messages.py::test_a_question_reaches_people_once_though_the_server_is_killed",
        "tests/integration/test_messages.py::test_each_team_gets_its_own_messages_and_no_others",
        "tests/integration/test_messages.py"
        "::test_the_sixth_job_of_a_power_emergency_is_told_though_the_server_is_killed",
        "tests/integration/test_node_repair.py",
        "tests/integration/test_slack.py::test_a_message_whose_posting_was_not_answered_is_found_and_not_posted_twice",
    ),
    "benchmarks": ("tests/integration/test_benchmarks.py",),
    "kills at random moments": (
        "tests/crash/test_accepted_is_kept.py",
        "tests/crash/test_beginnings_of_several_servers.py",
        "tests/crash/test_drain_kill.py",
        "tests/crash/test_drain_outages.py",
        "tests/crash/test_finding_kills.py",
        "tests/crash/test_group_of_agents.py",
        "tests/crash/test_kills_while_telling.py",
        "tests/crash/test_migration_kill.py",
        "tests/crash/test_power_kills.py",
        "tests/crash/test_power_kills_of_everything.py",
        "tests/crash/test_random_kills.py",
        "tests/crash/test_sentinels.py",
        "tests/crash/test_set_again_kills.py",
        "tests/crash/test_several_servers.py",
        "tests/crash/test_several_target_kills.py",
        "tests/crash/test_upgrade_in_turns.py",
    ),
    "attacks": ("tests/attack",),
    "whole nights, and alerts of public rule sets": (
        "tests/acceptance/strangers",
        "tests/acceptance/test_full_disk.py",
        "tests/acceptance/test_intervals.py",
        "tests/acceptance/test_questions_at_night.py",
        "tests/acceptance/test_unattended.py",
    ),
}
"""What the rest is about, and where it is."""

_NAMES = tuple(name for names in REST.values() for name in names)


def _covers(name: str, path: str) -> bool:
    return path == name or path.startswith((f"{name}/", f"{name}::", f"{name}["))


def part_of(node: str) -> Part:
    """Return the part of a test, by its node id, or of a file or folder as a whole, by its path from the root."""
    return Part.REST if any(_covers(name, node) for name in _NAMES) else Part.QUICK


def may_have_some_of(path: str, part: Part) -> bool:
    """Return whether a test file has to be looked into for tests of a part."""
    if part is Part.QUICK:
        return part_of(path) is Part.QUICK
    return part_of(path) is Part.REST or any(_covers(path, name) for name in _NAMES)
