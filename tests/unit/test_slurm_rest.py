"""The client of slurmrestd: what is wrong with its settings, before Slurm is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_server.adapters.slurm_rest import SlurmRest
from trainmedic_server.errors import ClusterUnavailable, ConfigurationError


@pytest.mark.parametrize(
    "url",
    ["unix://run/slurmrestd.sock", "unix://", "http://h:99999", "http://[::1", "http://", "ftp://h", "http://u:pw@h"],
)
def test_an_invalid_address_is_refused_at_the_start(url: str) -> None:
    """The message does not contain it, because a URL may hold a password."""
    with pytest.raises(ConfigurationError, match="http://HOST:6820 or unix:///PATH") as refused:
        SlurmRest(url)
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_file_without_certificates_is_refused_at_the_start(tmp_path: Path, text: str | None) -> None:
    """A step would otherwise end with an unknown outcome, although nothing was sent."""
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"ca\.pem"):
        SlurmRest("https://h:6820", ca_file=file)


@pytest.mark.parametrize("text", [None, ""])
async def test_a_token_that_is_being_renewed_counts_as_an_outage(tmp_path: Path, text: str | None) -> None:
    """`scontrol token > FILE` empties the file first. Actions retry this error until their deadline."""
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    slurm = SlurmRest("http://127.0.0.1:9", token_file=file)
    with pytest.raises(ClusterUnavailable, match="token"):
        await slurm.node("n1")
    await slurm.close()
