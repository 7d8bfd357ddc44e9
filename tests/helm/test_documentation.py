"""The commands and values of the documentation are ones that Helm and the chart take.

The pages on Kubernetes are followed here, because what they tell needs a cluster: each ``helm`` command is
carried out as far as rendering, with the files that the page has made; of ``kubectl`` the objects that it
names have to be there.
"""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm import charts
from tests.support import doc_pages

PAGES = ("docs/how-to/install.md", "docs/how-to/upgrade.md")
FLAGS = {
    "install": {"--namespace", "--create-namespace", "--wait", "--values", "--set"},
    "upgrade": {
        "--namespace", "--values", "--set", "--set-file", "--reset-then-reuse-values", "--reuse-values", "--dry-run"
    },
    "test": {"--namespace"},
    "history": {"--namespace"},
    "rollback": {"--namespace"},
    "uninstall": {"--namespace"},
    "package": set(),
}  # fmt: skip
MADE_BY_THE_READER = {("secret", "trainmedic"), ("namespace", "team-a")}


def lines(script: str) -> list[str]:
    """The commands of a script, each on one line."""
    return [line for line in script.replace("\\\n", " ").splitlines() if line.strip()]


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {name: merged(base[name], more[name]) for name in base.keys() & more.keys() if isinstance(more[name], dict)}
    return {**base, **more, **both}


def values_of(words: list[str], files: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for flag, given in itertools.pairwise(words):
        if flag == "--values":
            values = merged(values, yaml.safe_load(files[given]))
        elif flag == "--set" or flag == "--set-file":
            values = merged(values, helm_python.parse_set_string(given))
    return values


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page_match_the_chart(page: str) -> None:
    """Commands, flags, values and object names are checked."""
    blocks = doc_pages.blocks((charts.ROOT / page).read_text())
    files = {str(block.option("file")): block.body for block in blocks if block.option("file")}
    values: dict[str, Any] = {}
    tried = 0
    for block in blocks:
        if block.kind != "sh":
            continue
        for line in lines(block.body):
            for command in re.findall(r"\b(helm [a-z]+ [^|&)]*|kubectl [a-z]+ [^|&)]*|scripts/[a-z-]+)", line):
                words = shlex.split(command, posix=False) if "jsonpath" in command else shlex.split(command)
                if words[0] == "helm":
                    given = {word.partition("=")[0] for word in words if word.startswith("--")}
                    assert given <= FLAGS[words[1]], command
                    if words[1] in ("install", "upgrade"):
                        assert words[2:4] == ["trainmedic", "helm/trainmedic"], command
                        values = values_of(words, files) or values
                        charts.rendered(values, name="trainmedic")
                        tried += 1
                elif words[0] == "kubectl":
                    check_objects(words, charts.parsed(charts.rendered(values, name="trainmedic")))
                else:
                    assert (charts.ROOT / words[0]).is_file(), command
    assert tried


def check_objects(words: list[str], found: list[charts.Object]) -> None:
    """The object that a kubectl command names is made by the chart, and has the key that is read."""
    named = next((word for word in words[2:] if re.fullmatch(r"[a-z]+/[a-z-]+", word)), None)
    kind, name = named.split("/") if named else (words[2], words[3])
    if (kind, name) in MADE_BY_THE_READER or words[1] == "create":
        return
    each = next(one for one in found if (one["kind"].lower(), one["metadata"]["name"]) == (kind, name))
    for key in re.findall(r"jsonpath='\{\.data\.([-a-z]+)\}'", " ".join(words)):
        assert key in each["data"]


def test_the_values_files_of_the_page_enable_what_the_page_says() -> None:
    """act.yaml enforces, caps and cleans, and grants the permissions for a drain."""
    blocks = doc_pages.blocks((charts.ROOT / PAGES[0]).read_text())
    files = {str(block.option("file")): yaml.safe_load(block.body) for block in blocks if block.option("file")}
    found = charts.parsed(charts.rendered(merged(files["values.yaml"], files["act.yaml"]), name="trainmedic"))
    policy = yaml.safe_load(charts.one(found, "ConfigMap", "-agent-policy")["data"]["policy.yaml"])
    assert policy["allow"] == ["gpu.power_limit", "disk.clean"]
    assert [rule["resources"] for rule in charts.one(found, "ClusterRole")["rules"]]
    assert files["inside.yaml"]["image"]["digest"]


OTHER_PAGES = ("docs/how-to/messages.md", "docs/how-to/probe.md", "docs/how-to/read-logs.md", "docs/how-to/slack.md")


def test_every_page_with_values_is_tested_here() -> None:
    """Each page that shows values has them rendered by one of these tests."""
    every = {str(path.relative_to(charts.ROOT)) for path in (charts.ROOT / "docs").rglob("*.md")}
    assert {page for page in every if values_on(page)} == {PAGES[0], *OTHER_PAGES}


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_chart_values_on_other_pages_work_together(page: str) -> None:
    """Each file that a setting names lies in a mounted directory."""
    for values in values_on(page):
        found = charts.parsed(charts.rendered(values, name="trainmedic"))
        for _, pod in charts.pods(found):
            for container in pod["containers"]:
                mounts = container.get("volumeMounts", ())
                names = [each["value"] for each in container.get("env", ()) if each["name"].endswith("_FILE")]
                for name in names:
                    assert any(name.startswith(f"{mount['mountPath']}/") for mount in mounts), name


def test_slack_is_configured_by_a_secret_alone() -> None:
    """The file and both tokens are read from it; no value contains a token."""
    [values] = values_on("docs/how-to/slack.md")
    server = charts.one(charts.parsed(charts.rendered(values)), "Deployment")["spec"]["template"]["spec"]
    settings = {each["name"]: each.get("value") for each in server["containers"][0]["env"]}
    files = {name: value for name, value in settings.items() if name.startswith("TRAINMEDIC_SLACK_")}
    assert files == {
        "TRAINMEDIC_SLACK_FILE": "/etc/trainmedic/slack/slack.yaml",
        "TRAINMEDIC_SLACK_BOT_TOKEN_FILE": "/etc/trainmedic/slack/bot-token",
        "TRAINMEDIC_SLACK_APP_TOKEN_FILE": "/etc/trainmedic/slack/app-token",
    }
    assert {"name": "slack", "mountPath": "/etc/trainmedic/slack", "readOnly": True} in server["containers"][0][
        "volumeMounts"
    ]
    (volume,) = [each for each in server["volumes"] if each["name"] == "slack"]
    assert volume["secret"]["secretName"] == "trainmedic-slack"


def values_on(page: str) -> list[dict[str, Any]]:
    """What the page shows of the chart's values."""
    names = yaml.safe_load((charts.CHART / "values.yaml").read_text()).keys()
    shown = (block.body for block in doc_pages.blocks((charts.ROOT / page).read_text()) if block.kind == "yaml")
    documents = [yaml.safe_load(body) for body in shown if re.match(rf"(#.*\n)*({'|'.join(names)}):", body)]
    return [document for document in documents if document.keys() <= names]
