"""Links in messages."""

from __future__ import annotations

from trainmedic_server.domain import links

RUN = "01a2007e-b907-7c1a-8000-6d2f41aa90c3"


def test_a_link_to_a_run_names_it_whole() -> None:
    """So that it leads to the same run however many there are."""
    assert links.run_link("https://medic.example.org/ops", RUN) == f"https://medic.example.org/ops/runs/{RUN}"


def test_without_an_external_url_there_is_no_link() -> None:
    """None is better than one that leads nowhere."""
    assert links.run_link("", RUN) == ""


def test_parts_of_a_link_are_escaped() -> None:
    """Names come from labels, which others choose."""
    assert links.link("https://m.example", "jobs", "a/b?c") == "https://m.example/jobs/a%2Fb%3Fc"


def test_a_short_id_is_the_end_of_the_id() -> None:
    """Runs of one second begin alike."""
    assert links.short_id(RUN) == "41aa90c3"
