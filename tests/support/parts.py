"""The two parts of the tests: the quick one, which every change needs, and the rest.

The rest needs downloads that few changes are about, or takes minutes. A file, a folder or a test (`file::test`) that
`REST` names belongs to it; all else is quick. `BOTH` names property tests that play a fifth of their examples in the
quick part and the others in the rest. ``tests/conftest.py`` applies this where ``--part`` is given, as
``scripts/test`` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import PurePosixPath


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
        "tests/crash/test_slurm_kills.py",
        "tests/integration/server/test_slurm.py",
        "tests/integration/server/test_slurm_agent.py",
        "tests/integration/server/test_slurm_failover.py",
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
        "tests/integration/plain_torch/test_stranger_loops.py",
        "tests/integration/test_sdk_soak.py",
    ),
    "warm starts": ("tests/integration/launch/test_warm.py",),
    "jobs that fail": (
        "tests/integration/diagnosis",
        "tests/integration/test_report_verdicts.py",
    ),
    "the examples of the documentation": (
        "tests/integration/test_documentation.py::test_the_examples_of_a_page_behave_as_shown",
        "tests/integration/test_on_call.py",
        "tests/acceptance/test_demo.py",
        "tests/acceptance/test_example_job.py",
        "tests/acceptance/test_loss_spike.py",
        "tests/acceptance/test_protect_a_run.py",
    ),
    "distributions and their bills of materials": (
        "tests/integration/test_distributions.py",
        "tests/integration/test_supply.py",
    ),
    "probes of several nodes and ranks": (
        "tests/integration/test_probe.py::test_memory_is_tested_on_each_rank",
        "tests/integration/test_probe.py::test_a_rank_that_never_arrives_ends_the_probe",
        "tests/integration/test_probe.py::test_nodes_in_training_are_left_alone_by_default",
        "tests/integration/test_probe.py::test_pairs_of_nodes_are_compared_with_earlier_results",
        "tests/integration/test_probe.py::test_the_server_command_line_has_it_too",
    ),
    "long stories of an agent": (
        "tests/integration/agent/test_log_reader_process.py::test_an_externally_started_reader",
        "tests/integration/agent/test_log_reader_process.py::test_commands_are_not_affected_by_the_loss_of_the_reader",
        "tests/integration/agent/test_log_reading.py::test_an_agent_killed_at_random_loses_and_repeats_no_line",
        "tests/integration/agent/test_log_reading.py::test_logrotate_loses_no_line",
        "tests/integration/agent/test_log_reading.py::test_nothing_more_is_added_while_the_server_accepts_nothing",
        "tests/integration/agent/test_log_reading.py::test_forged_older_or_unreadable_rules_are_rejected",
        "tests/integration/agent/test_log_reading.py::test_the_last_good_rules_are_applied_without_a_server",
        "tests/integration/agent/test_log_shipping.py::test_a_server_finds_each_line_once_despite_kills",
        "tests/integration/agent/test_logs_to_alerts.py",
        "tests/integration/agent/test_node_health.py::test_a_load_test_measures_memory_and_links",
        "tests/integration/test_log_search.py::test_lines_of_six_formats_have_their_time_while_a_process_prints_them",
        "tests/integration/test_log_search.py::test_text_is_for_people_and_raw_for_other_programs",
        "tests/integration/test_log_search.py::test_lines_dated_only_by_arrival_survive_a_restart_of_the_agent",
        "tests/integration/test_agent.py::test_two_agents_with_one_name_get_no_commands",
        "tests/integration/test_known_nodes.py"
        "::test_an_agent_makes_its_node_known_in_every_spelling_and_beyond_its_end",
        "tests/integration/test_one_agent.py::test_a_gpu_that_appears_later_belongs_to_its_first_agent",
    ),
    "long stories of a server": (
        "tests/integration/test_downtime.py::test_a_run_from_before_a_long_downtime_is_stale_and_its_undo_still_pending",
        "tests/integration/test_downtime.py::test_alertmanager_is_asked_about_an_alert_that_ended_during_the_downtime",
        "tests/integration/test_forged_messages.py::test_a_forged_note_is_not_an_outcome",
        "tests/integration/test_forged_messages.py::test_a_forged_reply_is_not_an_outcome",
        "tests/integration/test_forged_messages.py::test_a_gpu_added_to_a_presence_brings_no_job_a_command",
        "tests/integration/test_forged_messages.py::test_a_rank_that_did_not_answer_is_reported_missing",
        "tests/integration/test_messages.py::test_a_question_is_sent_once_although_the_server_is_killed",
        "tests/integration/test_messages.py::test_each_team_gets_only_its_own_messages",
        "tests/integration/test_messages.py::test_the_sixth_job_of_a_power_emergency_is_reported_despite_a_kill",
        "tests/integration/test_node_repair.py",
        "tests/integration/test_one_server.py::test_a_backup_in_place_of_the_file_is_served_at_once",
        "tests/integration/test_one_server.py"
        "::test_a_copy_is_served_once_the_first_server_has_ended_and_then_blocks_it",
        "tests/integration/test_one_server.py::test_a_killed_server_restarts_at_once",
        "tests/integration/test_redis_outages.py::test_a_command_that_expires_in_an_outage_fails_its_run_and_is_undone",
        "tests/integration/test_redis_outages.py::test_commands_wait_for_a_redis_that_recovers_with_its_data",
        "tests/integration/test_standing_by.py::test_a_server_that_hung_does_nothing_after_it_resumes",
        "tests/integration/test_slack.py::test_a_message_whose_posting_was_not_answered_is_found_and_not_posted_twice",
    ),
    "benchmarks": ("tests/integration/test_benchmarks.py",),
    "kills at random moments": (
        "tests/crash/test_accepted_is_kept.py",
        "tests/crash/test_beginnings_of_several_servers.py",
        "tests/crash/test_drain_kill.py",
        "tests/crash/test_drain_outages.py",
        "tests/crash/test_finding_kills.py",
        "tests/crash/test_group_kills.py",
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
        "tests/integration/plain_torch/test_answers_after_a_death.py",
        "tests/integration/test_beginnings.py",
        "tests/unit/engine/test_kills_of_people.py",
    ),
    "attacks": (
        "tests/attack",
        "tests/helm/test_redis_users.py::test_exhausted_reply_ids_block_clients_only_briefly",
        "tests/integration/agent/test_log_reader_process.py"
        "::test_hostile_readers_cost_the_agent_neither_memory_nor_commands",
        "tests/integration/test_findings.py::test_a_stream_with_exhausted_ids_is_restarted",
        "tests/unit/diagnosis/test_folder.py::test_a_hostile_folder_is_read_in_bounded_time",
        "tests/unit/diagnosis/test_hostile_dumps.py::test_an_endless_load_is_terminated",
        "tests/unit/diagnosis/test_hostile_dumps.py::test_a_dump_that_takes_all_memory_ends_only_its_own_process",
        "tests/unit/diagnosis/test_reading_limits.py::test_many_expanding_dumps_take_bounded_memory",
    ),
    "whole nights, and alerts of public rule sets": (
        "tests/acceptance/strangers",
        "tests/acceptance/test_full_disk.py",
        "tests/acceptance/test_intervals.py",
        "tests/acceptance/test_questions_at_night.py",
        "tests/acceptance/test_unattended.py",
    ),
}
"""What the rest is about, and where it is."""

BOTH = (
    "tests/contract/test_run_store.py::test_any_alert_is_read_as_it_was_saved",
    "tests/contract/test_run_store.py::test_any_change_of_a_run_is_saved",
    "tests/contract/test_run_store.py::test_any_event_is_read_as_it_was_written",
    "tests/contract/test_run_store.py::test_any_run_is_read_as_it_was_added",
    "tests/integration/server/test_openapi_contract.py",
    "tests/unit/agent/disk/test_any_tree.py",
    "tests/unit/agent/log_reading/test_any_rotation.py",
    "tests/unit/domain/test_any_labels.py",
    "tests/unit/engine/test_any_history.py",
    "tests/unit/engine/test_several_targets.py::test_no_interleaving_of_runs_deadlocks_starves_or_overlaps",
    "tests/unit/playbooks/test_every_moment.py",
    "tests/unit/playbooks/test_true_texts.py",
)
"""Tests in both parts: `tests.support.examples` chooses their examples."""

LONGEST = (
    "tests/contract/test_slurm.py",
    "tests/integration/test_documentation.py",
    "tests/integration/server/test_slurm_failover.py",
    "tests/integration/test_slurm_actions.py",
    "tests/acceptance/upstream",
    "tests/crash/test_beginnings_of_several_servers.py",
    "tests/integration/launch/test_torchrun.py",
    "tests/unit/playbooks/test_every_moment.py",
    "tests/attack/test_hostile_jobs.py",
    "tests/acceptance/test_demo.py",
    "tests/integration/launch/test_outcomes.py",
    "tests/integration/frameworks",
    "tests/crash/test_several_target_kills.py",
    "tests/acceptance/test_loss_spike.py",
    "tests/acceptance/test_unattended.py",
    "tests/integration/agent",
    "tests/integration/server",
    "tests/integration/engines",
    "tests/integration/diagnosis",
    "tests/attack",
    "tests/crash",
    "tests/acceptance",
)
"""Where the longest files of the rest are, longest first. They are begun first, so that all workers end together."""

selected: Part | None = None
"""The part that runs. None: both."""

_REST = frozenset(name for names in REST.values() for name in names)


def _is_covered(test: str, names: Collection[str]) -> bool:
    """Return whether the names have this test, or its file or a folder of it."""
    file, _, _ = test.partition("::")
    return any(name in names for name in (test, file, *map(str, PurePosixPath(file).parents)))


def parts_of(node: str) -> frozenset[Part]:
    """Return the parts of a test, by its node id, or of a file or folder as a whole, by its path from the root."""
    return _parts_of_test(node.partition("[")[0])


@cache
def _parts_of_test(test: str) -> frozenset[Part]:
    if _is_covered(test, BOTH):
        return frozenset(Part)
    return frozenset({Part.REST if _is_covered(test, _REST) else Part.QUICK})


@cache
def place_in_rest(file: str) -> int:
    """Return a sort key of a file of the rest, by its path from the root: small where it takes long."""
    return next((place for place, name in enumerate(LONGEST) if _is_covered(file, (name,))), len(LONGEST))


def may_have_some_of(path: str, part: Part) -> bool:
    """Return whether a test file has to be looked into for tests of a part."""
    if part in parts_of(path):
        return True
    return part is Part.REST and any(name.startswith(f"{path}::") for name in (*_REST, *BOTH))
