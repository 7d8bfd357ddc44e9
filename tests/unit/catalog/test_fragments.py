"""Fragments: steps that several playbooks use, with inputs of their own."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest
from click.testing import CliRunner

from trainmedic_core import errors, yaml_text
from trainmedic_server.actions import registry
from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.library import Library
from trainmedic_server.catalog.schema import json_schema
from trainmedic_server.cli.playbook import playbook as command

ACTIONS = registry.specs_only()
FRAGMENT = """\
fragment: bring-back
inputs:
  percent: {type: number, default: 80}
  reason: {type: text, required: true}
steps:
  - {id: cap, action: gpu.power_limit, with: {percent: "{{ inputs.percent }}"}, on_error: continue}
  - when: steps.cap.status != "succeeded" and inputs.percent > 50
    action: notify
    with: {message: "{{ inputs.reason }}: {{ steps.cap.error }}"}
"""
PLAYBOOK = """\
playbook: hot
on: {alert: Hot}
target: gpu
vars: {low: 60}
steps:
  - {id: ask, approve: "Cap it?"}
  - {use: bring-back, with: {reason: "{{ labels.why }}", percent: "{{ vars.low }}"}}
  - {id: again, use: bring-back, with: {reason: again}}
  - when: steps["again.cap"].status == "failed"
    action: notify
    with: {message: "{{ steps['bring-back.cap'].status }}"}
"""
BOTH = f"{PLAYBOOK}---\n{FRAGMENT}"
POOL = """\
playbook: pool
on: {alert: Hot}
target: {nodes: {pool: h100}}
rollout:
  check:
    - {use: calm, with: {failed: "{{ group.failed }}"}}
    - {id: told, action: notify, with: {message: "{{ steps['calm.cool'].status }}"}}
steps:
  - {action: k8s.cordon}
---
fragment: calm
inputs: {failed: {type: number}}
steps:
  - {id: cool, wait_for: {query: "heat < 80"}, timeout: 5m}
  - {action: notify, with: {message: "{{ inputs.failed }}: {{ steps.cool.status }}"}}
"""
CAPPED = {"status": "failed", "params": {}, "output": {}, "error": "no agent", "attempts": 1}
SCOPE = {"labels": {"why": "hot"}, "vars": {"low": 60}, "steps": {"bring-back.cap": CAPPED}, "target": {}, "run": {}}


def compiled(text: str) -> YamlPlaybook:
    playbooks, problems = loader.load(text, "p.yaml", ACTIONS)
    assert not problems, problems
    return playbooks[0]


def problems_of(text: str) -> list[str]:
    return [str(problem) for problem in loader.load(text, "p.yaml", ACTIONS)[1]]


def test_a_repair_ladder_checks_the_node_after_each_step() -> None:
    """A node's GPUs are reset together; its health has a minimum rate, given as a template."""
    ladder = compiled("""\
playbook: ladder
on: {alert: GPURecoveryNeeded}
target: node
mode: approve
steps:
  - {use: bring-back, with: {min_gbps: 100}}
---
fragment: bring-back
inputs: {min_gbps: {type: number, default: 400}}
steps:
  - {id: reset, action: gpu.reset, on_error: continue}
  - id: fit
    wait_for: {action: node.health, with: {min_gbps: "{{ inputs.min_gbps }}"}, every: 30s}
    timeout: 10m
    on_timeout: continue
  - {id: boot, when: steps.fit.status != "succeeded", action: node.reboot}
  - {when: steps.boot.status == "succeeded", action: node.power_cycle, with: {attribute: bmc}}
""")
    assert ladder.params("steps", 1, SCOPE).model_dump()["min_gbps"] == 100


def test_the_steps_replace_their_use() -> None:
    """Their ids begin with that of the use, or with the fragment's name."""
    ids = [step.id for step in compiled(BOTH).definition.steps]
    assert ids == ["ask", "bring-back.cap", "bring-back.step-2", "again.cap", "again.step-2", None]


def test_inputs_are_rendered_in_the_playbook_and_visible_only_in_the_fragment() -> None:
    """Defaults hold where nothing is given; the fragment's steps are known to it by their short ids."""
    hot = compiled(BOTH)
    assert hot.params("steps", 1, SCOPE).model_dump()["percent"] == 60
    assert hot.when("steps", 2, SCOPE)
    assert hot.params("steps", 2, SCOPE).model_dump()["message"] == "hot: no agent"
    assert hot.params("steps", 3, SCOPE).model_dump()["percent"] == 80


def test_an_input_of_the_wrong_type_fails_the_step_that_needs_it() -> None:
    """Only a template can cause it: a constant is rejected when the playbook is loaded."""
    text = BOTH.replace("{{ vars.low }}", "{{ labels.why }}")
    with pytest.raises(errors.ExpressionError, match="fragment 'bring-back': percent: 'hot' is not a number"):
        compiled(text).params("steps", 1, SCOPE)


def test_the_stored_text_contains_its_fragments() -> None:
    """A run that began with them finds them there, whatever the folder holds by then."""
    hot = compiled(BOTH)
    assert "    fragment: bring-back" in hot.text
    again = loader.load_one(hot.text, "hot@1", ACTIONS)
    assert (again.version, again.definition) == (hot.version, hot.definition)
    assert again.params("steps", 2, SCOPE) == hot.params("steps", 2, SCOPE)


def test_a_fragment_from_another_file_is_known_in_its_folder_and_watched(tmp_path: Path) -> None:
    """The playbook is reloaded as a new version if only the fragment has changed."""
    (tmp_path / "hot.yaml").write_text(PLAYBOOK)
    (tmp_path / "shared.yaml").write_text(FRAGMENT)
    library = Library([tmp_path], ACTIONS)
    assert library.reload()
    assert not library.reload()
    assert library.problems == ()
    before = library.get("hot")
    (tmp_path / "shared.yaml").write_text(FRAGMENT.replace("default: 80", "default: 70"))
    assert library.reload()
    after = library.get("hot")
    assert before is not None
    assert after is not None
    assert before.version != after.version
    assert after.params("steps", 3, SCOPE).model_dump()["percent"] == 70
    (tmp_path / "shared.yaml").unlink()
    assert library.reload()
    assert library.get("hot") == after
    problem, _ = library.problems
    assert "there is no fragment 'bring-back' in this folder" in str(problem)
    assert (problem.file, problem.line) == (str(tmp_path / "hot.yaml"), 7)


def test_a_template_file_named_by_a_fragment_belongs_to_the_playbook(tmp_path: Path) -> None:
    """It is treated like one named by the playbook itself."""
    health = (
        "fragment: fit\nsteps:\n  - {action: k8s.create_job, with: {template: health_template.yaml, namespace: ops}}\n"
    )
    (tmp_path / "fit.yaml").write_text(health)
    (tmp_path / "use.yaml").write_text("playbook: p\non: {alert: A}\ntarget: node\nsteps:\n  - {use: fit}\n")
    manifest = (
        "metadata: {name: h}\nspec:\n  template:\n    spec: {containers: [{name: c, image: i}], restartPolicy: Never}\n"
    )
    (tmp_path / "health_template.yaml").write_text(manifest)
    library = Library([tmp_path], ACTIONS)
    library.reload()
    assert library.problems == ()
    assert {"fragments", "files"} <= yaml_text.read(library.all()[0].text, "p")[0][0].value.keys()


def test_an_error_in_a_step_names_the_line_of_the_fragment_and_of_its_use() -> None:
    """One that shows only where the fragment is used, such as a name or the kind of target."""
    (problem, other) = problems_of(BOTH.replace("steps.cap.error", "steps.cap.eror"))
    assert problem.startswith("p.yaml:21:")
    assert "did you mean 'error'?" in problem
    assert problem.endswith("(fragment 'bring-back', used at p.yaml:7)")
    assert other.endswith("(fragment 'bring-back', used at p.yaml:8)")


def test_the_check_of_a_group_may_use_a_fragment() -> None:
    """It stands in the stored text like any other, and an error names both lines."""
    pool = compiled(POOL)
    assert [step.id for step in pool.definition.phase("check")] == ["calm.cool", "calm.step-2", "told"]
    scope = {**SCOPE, "group": {"failed": 3}, "steps": {"calm.cool": {**CAPPED, "status": "succeeded"}}}
    assert pool.params("check", 1, scope).model_dump()["message"] == "3: succeeded"
    assert pool.params("check", 2, scope).model_dump()["message"] == "succeeded"
    assert loader.load_one(pool.text, "pool@1", ACTIONS).definition == pool.definition
    (problem,) = problems_of(POOL.replace("steps.cool", "steps.col"))
    assert problem.startswith("p.yaml:15:")
    assert problem.endswith("(fragment 'calm', used at p.yaml:6)")


TOLD = """\
playbook: full
on: {alert: Full}
target: node
guards:
  max_runs: {count: 1, per: 1h}
  on_limited:
    - {id: often, use: tell, with: {what: "{{ run.message }}"}}
    - {when: 'steps["often.page"].status == "failed"', action: notify, with: {message: late}}
steps:
  - {action: k8s.cordon}
on_failure:
  - {use: tell, with: {what: "{{ run.message }}"}}
---
fragment: tell
inputs: {what: {type: text}}
steps:
  - {id: page, action: notify, with: {message: "{{ target.node }}: {{ inputs.what }}"}}
"""


def test_steps_after_a_failure_or_a_refusal_may_use_a_fragment() -> None:
    """In `on_limited`, only actions that change nothing are allowed; the schema accepts it too."""
    full = compiled(TOLD)
    assert [step.id for step in full.definition.phase("on_limited")] == ["often.page", None]
    assert [step.id for step in full.definition.on_failure] == ["tell.page"]
    scope = {**SCOPE, "target": {"node": "n1"}, "run": {"message": "no"}}
    for phase in ("on_limited", "on_failure"):
        assert full.params(phase, 0, scope).model_dump()["message"] == "n1: no"
    assert loader.load_one(full.text, "full@1", ACTIONS).definition == full.definition
    assert jsonschema_rs.is_valid(json_schema(ACTIONS), yaml_text.read(TOLD, "p")[0][0].value)
    for step, cure in (("{wait: 5m}", "only actions that change nothing"), ("{action: k8s.drain}", "notifies people")):
        *_, problem = problems_of(TOLD.replace("steps:\n  - {id: page", f"steps:\n  - {step}\n  - {{id: page"))
        assert problem.startswith("p.yaml:17:")
        assert cure in problem
        assert problem.endswith("(fragment 'tell', used at p.yaml:7)")


def test_an_error_in_the_form_of_a_fragment_is_reported_once_at_its_place() -> None:
    """Each use refers to that place."""
    own, *uses = problems_of(BOTH.replace("type: number", "type: float"))[::-1]
    assert own.startswith("p.yaml:15:")
    assert [each.rpartition(": use: ")[2] for each in uses] == ["fragment 'bring-back' has errors, p.yaml:13"] * 2


@pytest.mark.parametrize(
    ("use", "named", "cure"),
    [
        ("{use: bring-bak, with: {reason: a}}", "'bring-bak'", "did you mean 'bring-back'?"),
        ("{use: other, with: {reason: a}}", "no fragment 'other' in this folder", "there are bring-back"),
        ("{use: bring-back}", "with.reason: is required", "p.yaml:9"),
        ("{use: bring-back, with: {reson: a, reason: b}}", "no such input", "did you mean 'reason'?"),
        ("{use: bring-back, with: {reason: a, percent: hot}}", "with.percent: 'hot' is not a number", "p.yaml:9"),
        ("{use: bring-back, with: {reason: {a: b}}}", "with.reason", "must be text"),
        ("{use: bring-back, with: {reason: '{{ labls.a }}'}}", "labls", "did you mean 'labels'?"),
        ("{use: bring-back, when: labels.a, with: {reason: a}}", "'when'", "over its inputs"),
        ("{use: bring-back, if: labels.a, with: {reason: a}}", "'if'", "write when at the fragment's steps"),
        ("{use: bring-back, timeout: 5m, with: {reason: a}}", "'timeout'", "at the fragment's steps"),
        ("{use: bring-back, retry: {attempts: 2}}", "'retry'", "at the fragment's steps"),
        ("{use: bring-back, undo: on_resolve}", "'undo'", "at the fragment's steps"),
        ("{use: bring-back, action: notify}", "'action'", "exactly one"),
        ("{use: bring-back, loop: [1, 2]}", "'loop'", "no loops"),
        ("{use: bring-back, vars: {reason: a}}", "'vars'", "with: {name: value}"),
        ("{use: bring-back, with: a}", "with", "with: {name: value}"),
        ("{use: [bring-back]}", "use", "use: NAME"),
        ("{include: bring-back}", "include", "use: NAME"),
        ("{uses: bring-back}", "uses", "use: NAME"),
    ],
)
def test_an_invalid_use_is_rejected_with_the_remedy(use: str, named: str, cure: str) -> None:
    """The error is at the line of the use."""
    text = f"playbook: hot\non: {{alert: Hot}}\ntarget: gpu\nsteps:\n  - {use}\n\n\n---\n{FRAGMENT}"
    problems = problems_of(text)
    assert any(each.startswith("p.yaml:5:") and named in each and cure in each for each in problems), problems


@pytest.mark.parametrize(
    ("old", "new", "named", "cure"),
    [
        ("inputs:\n", "vars: {a: 1}\ninputs:\n", "'vars'", "a fragment has inputs"),
        ("inputs:\n", "target: gpu\ninputs:\n", "'target'", "belongs to the playbook"),
        ("inputs:\n", "on: {alert: A}\ninputs:\n", "'on'", "belongs to the playbook"),
        ("inputs:\n", "playbook: p\ninputs:\n", "'playbook'", "belongs to the playbook"),
        ("inputs:\n", "outputs: {a: 1}\ninputs:\n", "'outputs'", "steps['<use>.<step>'].output"),
        ("{type: number, default: 80}", "{type: number, default: hot}", "default: 'hot'", "not a number"),
        ("{type: number, default: 80}", "80", "inputs.percent", "{type: number, default: 100}"),
        ("{{ inputs.percent }}", "{{ inputs.percnt }}", "no input 'percnt'", "did you mean 'percent'?"),
        ("{{ inputs.percent }}", "{{ vars.low }}", "a fragment has no vars", "declare an input"),
        ("{{ inputs.reason }}", "{{ steps.ask.status }}", "no step 'ask'", "as an input"),
        ("steps.cap.status", "steps.cap.state", "'state'", "steps.cap.status"),
        ("- {id: cap, action: gpu.power_limit,", "- {use: bring-back}\n  - {id: cap, action: gpu.power_limit,", "use",
         "cannot use another"),
    ],
)  # fmt: skip
def test_an_invalid_fragment_is_rejected_with_the_remedy(old: str, new: str, named: str, cure: str) -> None:
    assert old in FRAGMENT
    problems = problems_of(f"{PLAYBOOK}---\n{FRAGMENT.replace(old, new)}")
    assert any(named in each and cure in each for each in problems), problems


def test_a_step_of_a_fragment_needs_brackets_outside_it() -> None:
    (problem,) = problems_of(BOTH.replace('steps["again.cap"]', "steps.again.cap"))
    assert "steps['again.cap']" in problem


def test_two_uses_need_different_ids() -> None:
    problems = problems_of(BOTH.replace("id: again, ", ""))
    assert any("give this one its own id" in each for each in problems)


def test_two_fragments_with_one_name_are_rejected(tmp_path: Path) -> None:
    """This holds within a file and a folder; another folder may have the name too."""
    assert any("is on line 13 too" in each for each in problems_of(f"{BOTH}---\n{FRAGMENT}"))
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(FRAGMENT)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.yaml").write_text(FRAGMENT)
    library = Library([tmp_path], ACTIONS)
    library.reload()
    (problem,) = library.problems
    assert (problem.file, "a.yaml:1" in problem.message) == (str(tmp_path / "b.yaml"), True)


def test_a_playbook_in_braces_cannot_contain_its_fragments() -> None:
    text = "{playbook: p, on: {alert: A}, target: gpu, steps: [{use: bring-back, with: {reason: a}}]}"
    assert any("without the outer braces" in each for each in problems_of(f"{text}\n---\n{FRAGMENT}"))


def test_too_many_uses_are_rejected_at_little_cost() -> None:
    """The limit is that of steps in a list, including those of its fragments."""
    uses = "".join(f"  - {{id: u{n}, use: bring-back, with: {{reason: a}}}}\n" for n in range(200))
    problems = problems_of(f"playbook: p\non: {{alert: A}}\ntarget: gpu\nsteps:\n{uses}---\n{FRAGMENT}")
    assert any("over 200 steps with those of its fragments" in each for each in problems)


def test_check_counts_fragments_and_hints_at_unused_ones(tmp_path: Path) -> None:
    """A file of fragments alone is no mistake."""
    (tmp_path / "shared.yaml").write_text(FRAGMENT)
    alone = CliRunner().invoke(command, ["check", str(tmp_path / "shared.yaml")])
    assert alone.exit_code == 0
    assert "shared.yaml:1:1: hint: no playbook here uses fragment 'bring-back'" in alone.output
    (tmp_path / "hot.yaml").write_text(PLAYBOOK)
    used = CliRunner().invoke(command, ["check", str(tmp_path)])
    assert used.output == "1 playbook, 1 fragment, no mistake.\n"
    one = CliRunner().invoke(command, ["check", str(tmp_path / "hot.yaml")])
    assert one.output == "1 playbook, no mistake.\n"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (PLAYBOOK, True),
        (POOL.partition("---")[0], True),
        (FRAGMENT, True),
        (FRAGMENT.replace("type: number", "type: float"), False),
        (FRAGMENT.replace('percent: "{{ inputs.percent }}"', "percnt: 5"), False),
        (PLAYBOOK.replace("use: bring-back, with", "use: bring-back, timeout: 5m, with"), False),
    ],
)
def test_an_editor_knows_fragments(text: str, valid: bool) -> None:
    (document,), _ = yaml_text.read(text, "f")
    schema = json.loads(json.dumps(json_schema(ACTIONS)))
    assert jsonschema_rs.validator_for(schema).is_valid(document.value) is valid


@pytest.mark.parametrize("uses", ["  - &a {use: f}\n  - *a\n", "  &a [{use: f}]\non_failure: *a\n"])
def test_a_use_may_be_an_alias(uses: str) -> None:
    """Its place is that of the alias."""
    fragment = "fragment: f\nsteps: [{action: k8s.cordon}]\n"
    (found,) = problems_of(f"playbook: p\non: {{alert: A}}\ntarget: node\nsteps:\n{uses}---\n{fragment}")
    assert ":6:" in found
    assert "earlier use" in found
