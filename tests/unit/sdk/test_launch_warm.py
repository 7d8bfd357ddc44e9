"""Requests of torchrun to the process that forks its ranks."""

from __future__ import annotations

import socket

from trainmedic.launch.warm import _fork_rank


def test_a_killed_torchrun_ends_the_requests() -> None:
    """This holds also if messages to it were unread, for which Linux resets the connection."""
    own, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own:
        own.send(b"ended")
        its_end.close()
        assert _fork_rank(own) == 0
