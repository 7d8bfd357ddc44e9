"""The contract of `ports.Notifier`, by Apprise's JSON notification to a real server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainmedic_server.adapters.apprise_notifier import AppriseNotifier
from trainmedic_server.errors import ConfigurationError, PermanentFailure, TemporaryFailure


def _json(peer, path):
    return f"json://127.0.0.1:{peer.port}{path}"


async def test_a_message_reaches_the_channel_that_is_named(peer):
    """Title and message arrive, at that channel only, as the text that they are."""
    notifier = AppriseNotifier({"oncall": [_json(peer, "/oncall")], "team": [_json(peer, "/team")]})
    await notifier.notify("Hot", "GPU 3 <!channel> *is* hot", "oncall")
    assert [one.path.rstrip("/") for one in peer.requests] == ["/oncall"]
    body = json.loads(peer.requests[0].body)
    assert (body["title"], body["message"]) == ("Hot", "GPU 3 <!channel> *is* hot")


async def test_a_message_without_a_channel_reaches_all(peer):
    """Every URL of every channel gets it once."""
    notifier = AppriseNotifier({"a": [_json(peer, "/a1"), _json(peer, "/a2")], "b": [_json(peer, "/b")]})
    await notifier.notify("t", "m", None)
    assert sorted(one.path.rstrip("/") for one in peer.requests) == ["/a1", "/a2", "/b"]


async def test_a_channel_that_nobody_knows_is_named(peer):
    """The failure is permanent and tells which channels there are."""
    with pytest.raises(PermanentFailure, match="no channel 'nightly'; there are: oncall"):
        await AppriseNotifier({"oncall": [_json(peer, "/")]}).notify("t", "m", "nightly")


async def test_no_channel_at_all_is_told():
    """A server that has none says so."""
    with pytest.raises(PermanentFailure, match="no notification channel is configured"):
        await AppriseNotifier({}).notify("t", "m", None)


def test_a_channel_without_a_url_is_refused():
    """It would swallow every message."""
    with pytest.raises(ConfigurationError, match="'oncall' has no URL"):
        AppriseNotifier({"oncall": []})


async def test_what_reached_nobody_may_be_sent_again(peer, caplog, capsys):
    """Another attempt may succeed; neither error nor log tells the URL."""
    notifier = AppriseNotifier({"oncall": [_json(peer, "/status/500/s3cret")]})
    with pytest.raises(TemporaryFailure, match="could not be sent to oncall") as caught:
        await notifier.notify("t", "m", "oncall")
    printed = capsys.readouterr()
    assert "s3cret" not in f"{caught.value}{caplog.text}{printed.out}{printed.err}"


async def test_what_reached_some_is_not_sent_again(peer):
    """Those who have it would get it twice, so another attempt is refused and those who missed it are named."""
    notifier = AppriseNotifier({"well": [_json(peer, "/ok")], "ill": [_json(peer, "/status/500")]})
    with pytest.raises(PermanentFailure, match="could not be sent to ill; the others received it"):
        await notifier.notify("t", "m", None)


async def test_a_url_that_cannot_be_read_is_not_told(caplog, capsys):
    """The failure says which one it is by its place."""
    notifier = AppriseNotifier({"oncall": ["slakc://s3cret/token"]})
    with pytest.raises(PermanentFailure, match="URL 1 of channel 'oncall'") as caught:
        await notifier.notify("t", "m", "oncall")
    printed = capsys.readouterr()
    assert "s3cret" not in f"{caught.value}{caplog.text}{printed.out}{printed.err}"


async def test_a_url_that_cannot_be_read_keeps_no_message_from_other_channels(peer):
    """It is a typing error in one of them, and all are needed at night."""
    notifier = AppriseNotifier({"oncall": [_json(peer, "/oncall")], "team": ["slakc://s3cret/token"]})
    with pytest.raises(PermanentFailure, match=r"URL 1 of channel 'team'.*; the others received it"):
        await notifier.notify("t", "m", None)
    assert [one.path.rstrip("/") for one in peer.requests] == ["/oncall"]


def test_a_server_that_sends_nothing_does_not_load_apprise():
    """Making a notifier costs no start-up time."""
    code = (
        "import sys; from trainmedic_server.adapters.apprise_notifier import AppriseNotifier; "
        "AppriseNotifier({'a': ['json://h']}); sys.exit('apprise' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
