"""Greeting of readers."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

from tests.support.programs import eventually
from tests.unit.agent.log_link.linking import LONG, LinkedAgent, PlayedReader
from trainmedic_agent.log_link import link_socket
from trainmedic_agent.log_link.messages import GpusNow, Welcome
from trainmedic_agent.log_link.reader_news import ReaderNews
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_reading.log_store import NodeBoot


def test_a_reader_that_ends_before_its_greeting_keeps_no_core_busy(tmp_path: Path) -> None:
    """The next reader is greeted."""
    with LinkedAgent(tmp_path) as agent:
        link_socket.connect(tmp_path).close()
        eventually(lambda: agent.link.generation == 1 and not agent.link.is_connected, LONG, "its end", every=0.01)
        welcome = Welcome(LogsPolicy(), NodeBoot("n1", "boot", None))
        uuids = Mock(return_value={"0000:18:00.0": "GPU-a"})
        news = ReaderNews(agent.link, Mock(), welcome, uuids, None, agent.counters)
        looks = Mock(side_effect=news._round)
        news._round = looks  # type: ignore[method-assign]
        began = time.monotonic()
        news.start()
        time.sleep(0.2)
        assert looks.call_count <= 2 + time.monotonic() - began  # one a second
        reader = PlayedReader(link_socket.connect(tmp_path))
        assert reader.gets(GpusNow).uuids == uuids.return_value
        reader.gets(Welcome)
        news.stop(LONG)
        reader.socket.close()
