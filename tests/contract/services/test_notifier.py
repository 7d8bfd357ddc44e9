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


async def test_a_message_reaches_the_named_channel(peer):
    """Title and message arrive unchanged, and only at that channel."""
    notifier = AppriseNotifier({"oncall": [_json(peer, "/oncall")], "team": [_json(peer, "/team")]})
    await notifier.notify("Hot", "GPU 3 <!channel> *is* hot", "oncall")
    assert [one.path.rstrip("/") for one in peer.requests] == ["/oncall"]
    body = json.loads(peer.requests[0].body)
    assert (body["title"], body["message"]) == ("Hot", "GPU 3 <!channel> *is* hot")


async def test_a_message_without_a_channel_reaches_all_channels(peer):
    """Every URL of every channel receives it once."""
    notifier = AppriseNotifier({"a": [_json(peer, "/a1"), _json(peer, "/a2")], "b": [_json(peer, "/b")]})
    await notifier.notify("t", "m", None)
    assert sorted(one.path.rstrip("/") for one in peer.requests) == ["/a1", "/a2", "/b"]


async def test_an_unknown_channel_is_named(peer):
    """The failure is permanent and lists the existing channels."""
    with pytest.raises(PermanentFailure, match="no channel 'nightly'; there are: oncall"):
        await AppriseNotifier({"oncall": [_json(peer, "/")]}).notify("t", "m", "nightly")


async def test_a_server_without_channels_reports_it():
    with pytest.raises(PermanentFailure, match="no notification channel is configured"):
        await AppriseNotifier({}).notify("t", "m", None)


def test_a_channel_without_a_url_is_rejected():
    """It would swallow every message."""
    with pytest.raises(ConfigurationError, match="'oncall' has no URL"):
        AppriseNotifier({"oncall": []})


async def test_a_message_that_reached_no_one_may_be_retried(peer, caplog, capsys):
    """A retry may succeed; neither error nor log contains the URL."""
    notifier = AppriseNotifier({"oncall": [_json(peer, "/status/500/s3cret")]})
    with pytest.raises(TemporaryFailure, match="could not be sent to oncall") as caught:
        await notifier.notify("t", "m", "oncall")
    printed = capsys.readouterr()
    assert "s3cret" not in f"{caught.value}{caplog.text}{printed.out}{printed.err}"


async def test_a_partly_delivered_message_is_not_retried(peer):
    """Some would receive it twice, so no retry is allowed; the error names those who did not get it."""
    notifier = AppriseNotifier({"well": [_json(peer, "/ok")], "ill": [_json(peer, "/status/500")]})
    with pytest.raises(PermanentFailure, match="could not be sent to ill; the others received it"):
        await notifier.notify("t", "m", None)


async def test_an_unreadable_url_is_not_revealed(caplog, capsys):
    """The failure identifies it by its position."""
    notifier = AppriseNotifier({"oncall": ["slakc://s3cret/token"]})
    with pytest.raises(PermanentFailure, match="URL 1 of channel 'oncall'") as caught:
        await notifier.notify("t", "m", "oncall")
    printed = capsys.readouterr()
    assert "s3cret" not in f"{caught.value}{caplog.text}{printed.out}{printed.err}"


@pytest.mark.parametrize("channel", ["oncall", "team"])
async def test_an_unreadable_url_keeps_no_message_from_other_urls(peer, channel):
    """It is a typo in one of them, and all are needed at night."""
    channels = {"oncall": [_json(peer, "/oncall")]}
    channels[channel] = ["slakc://s3cret/token", *channels.get(channel, [])]
    notifier = AppriseNotifier(channels)
    with pytest.raises(PermanentFailure, match=rf"URL 1 of channel '{channel}'.*; the others received it"):
        await notifier.notify("t", "m", None)
    assert [one.path.rstrip("/") for one in peer.requests] == ["/oncall"]


def test_a_server_that_sends_nothing_does_not_load_apprise():
    """Creating a notifier does not slow down the start."""
    code = (
        "import sys; from trainmedic_server.adapters.apprise_notifier import AppriseNotifier; "
        "AppriseNotifier({'a': ['json://h']}); sys.exit('apprise' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
