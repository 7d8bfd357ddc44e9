"""In which namespace a job says that it runs."""

from __future__ import annotations

from pathlib import Path

from trainmedic.job.server_connection import pod_namespace


def test_the_namespace_is_that_of_the_pods_service_account(tmp_path: Path) -> None:
    """Where there is none, or what is there is none, nothing is said."""
    file = tmp_path / "namespace"
    assert pod_namespace(file) is None
    for text, name in (("ml-team\n", "ml-team"), ("", None), ("x" * 64, None), ("a\x00b", None)):
        file.write_text(text)
        assert pod_namespace(file) == name
    file.write_bytes(b"\xff\xfe")
    assert pod_namespace(file) is None
