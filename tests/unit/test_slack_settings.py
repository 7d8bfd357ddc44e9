"""What is set of Slack: the file that names channels and people, and the tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmedic_server.adapters.slack import people
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.settings.server import load

GOOD = """
channel: C0GPUS
channels: {pager: C0PAGER}
people:
  U0ANN: {name: ann, groups: [hardware]}
"""
SECRET = "s3cret-and-l0ng"


def test_the_file_says_where_and_who(tmp_path: Path) -> None:
    """A question goes to the channel of its own where the playbook names one that is there."""
    (tmp_path / "slack.yaml").write_text(GOOD)
    file = people.read(tmp_path / "slack.yaml")
    assert [file.channel_for(to) for to in (None, "pager", "mail")] == ["C0GPUS", "C0PAGER", "C0GPUS"]
    assert file.people["U0ANN"] == people.Person(name="ann", groups=frozenset({"hardware"}))
    assert file.api == "https://slack.com/api"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file: Input should be"),
        ("people: [", r"slack\.yaml:1:10: a '\['"),
        (GOOD + "channel: C0OTHER", r"slack\.yaml:6:1: the key 'channel' is written twice; first on line 2"),
        (f"{GOOD}---{GOOD}", "must contain one YAML document, not 2"),
        (GOOD.replace("C0GPUS", "'#gpus'"), "channel: String should match"),
        (GOOD.replace("U0ANN", "ann"), "people.ann"),
        (GOOD.replace("name: ann", "name: trainmedic"), "is a reserved name"),
        (GOOD.replace("name: ann", "name: Anonymous"), "is a reserved name"),
        (GOOD.replace("name: ann", "name: a/b"), "people.U0ANN.name"),
        (GOOD.replace("{name: ann", "{role: operator, name: ann"), "people.U0ANN.role: Extra"),
        (GOOD + "api: http://slack.example/api", "must be an https:// URL"),
        (GOOD + "api: https:///api", "must be an https:// URL"),
        (GOOD + "token: xoxb-1", "token: Extra"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """With the member that is wrong."""
    (tmp_path / "slack.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        people.read(tmp_path / "slack.yaml")


def test_an_unreadable_file_is_named_with_its_setting_and_the_remedy(tmp_path: Path) -> None:
    """A missing file, a directory, and a file that is not UTF-8 text."""
    (tmp_path / "latin.yaml").write_bytes(b"channel: \xe9")
    for path, reason in (
        (tmp_path / "slack.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "latin.yaml", "not UTF-8 text"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            people.read(path)
        assert str(caught.value) == (
            f"--slack: cannot read {path}: {reason}; name a text file that user {os.geteuid()} can read"
        )


@pytest.mark.parametrize("token", ["BOT", "APP"])
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("/nowhere", "cannot read /nowhere: No such file or directory; name a text file that user"),
        ("~nobody-here/token", "cannot read ~nobody-here/token: there is no home directory ~nobody-here; write"),
        ("/dev/null", "/dev/null is empty; write the value into it, or unset"),
    ],
)
def test_an_unreadable_token_file_is_named_with_its_setting(token: str, file: str, reason: str) -> None:
    """Also by a home directory that does not exist."""
    variable = f"TRAINMEDIC_SLACK_{token}_TOKEN_FILE"
    with pytest.raises(ConfigurationError) as caught:
        load({}, {variable: file})
    assert str(caught.value).startswith(f"{variable}: {reason}")


@pytest.mark.parametrize("missing", ["BOT", "APP"])
def test_both_tokens_are_needed(missing: str) -> None:
    """And the one that is not there is named."""
    tokens = {"TRAINMEDIC_SLACK_BOT_TOKEN": f"xoxb-{SECRET}", "TRAINMEDIC_SLACK_APP_TOKEN": f"xapp-{SECRET}"}
    assert load({"slack": Path("f")}, tokens).slack_tokens() == (f"xoxb-{SECRET}", f"xapp-{SECRET}")
    del tokens[f"TRAINMEDIC_SLACK_{missing}_TOKEN"]
    with pytest.raises(ConfigurationError, match=f"needs TRAINMEDIC_SLACK_{missing}_TOKEN"):
        load({"slack": Path("f")}, tokens).slack_tokens()


def test_tokens_that_changed_places_are_refused_and_not_shown() -> None:
    """They are told apart by how they begin."""
    with pytest.raises(ConfigurationError, match="must be a token that begins with xoxb-") as caught:
        load({}, {"TRAINMEDIC_SLACK_BOT_TOKEN": f"xapp-{SECRET}"})
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(load({}, {"TRAINMEDIC_SLACK_BOT_TOKEN": f"xoxb-{SECRET}"}))
