"""What ``http.request`` lets a playbook write, and what a value from an alert can do to it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainmedic_server.actions.http import HttpParams, HttpRequest
from trainmedic_server.ports.actions import TemplateChecked


def _params(**given):
    return HttpParams.model_validate({"method": "POST", "url": "https://host/path", **given})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://host/", "begins with http"),
        ("file:///etc/passwd", "begins with http"),
        ("host/path", "begins with http"),
        ("https://medic:s3cret@host/", "bearer_from_env"),
        ("https:///path", "names no host"),
        ("https://host:0/", "port is 0"),
        ("https://host/a b", "spaces"),
        ("https://host/a\r\nX: 1", "control characters"),
        ("https://host\\@evil/", "backslashes"),
        ("https://host/#part", "fragment"),
        ("https://host/a/../admin", "'..' segment"),
        ("https://host/a/%2e%2E/admin", "'..' segment"),
        ("https://host/" + "a" * 8192, "8192"),
    ],
)
def test_a_url_with_a_variable_destination_is_rejected(url, why):
    """The message gives the reason but not the URL: it may contain a password."""
    with pytest.raises(ValidationError, match=why) as caught:
        _params(url=url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["Authorization", "cookie", "Host", "Content-Length", "idempotency-key", "a b", ""])
def test_a_header_that_is_secret_or_reserved_is_rejected(name):
    """Secrets are named, not written; headers that frame the request are not for playbooks to set."""
    with pytest.raises(ValidationError, match="header"):
        _params(headers={name: "x"})


def test_a_header_value_holds_one_line():
    """A value cannot start another header."""
    with pytest.raises(ValidationError, match="control character"):
        _params(headers={"X-Job": "a\r\nX-Admin: 1"})


def test_only_secrets_meant_for_playbooks_can_be_named():
    """A playbook cannot send the server's own secrets away."""
    assert _params(bearer_from_env="TRAINMEDIC_HTTP_PAGER").bearer_from_env == "TRAINMEDIC_HTTP_PAGER"
    for name in ("TRAINMEDIC_SIGNING_KEY", "AWS_SECRET_ACCESS_KEY", "TRAINMEDIC_HTTP_"):
        with pytest.raises(ValidationError):
            _params(bearer_from_env=name)


@pytest.mark.parametrize(
    ("expect", "met", "not_met"),
    [
        (None, [200, 204, 299], [199, 300, 404]),
        (404, [404], [200, 403]),
        ("4xx", [400, 499], [500]),
        ("200-204", [200, 202, 204], [205]),
        (["2xx", 404, "500-599"], [201, 404, 503], [403]),
    ],
)
def test_expected_statuses_are_numbers_classes_and_ranges(expect, met, not_met):
    """The default is any success."""
    params = _params() if expect is None else _params(expect=expect)
    assert all(params.expects(status) for status in met)
    assert not any(params.expects(status) for status in not_met)


@pytest.mark.parametrize("expect", ["ok", "20x", "600", "204-200", [], "200-", 2000])
def test_an_invalid_status_is_rejected(expect):
    """A typo would make every answer a failure."""
    with pytest.raises(ValidationError):
        _params(expect=expect)


def test_a_call_has_one_body():
    """Neither of two is dropped silently."""
    with pytest.raises(ValidationError, match="json or body"):
        _params(json=[], body="x")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_body_has_only_json_numbers(number):
    """Python would write NaN and Infinity, which no other program reads."""
    with pytest.raises(ValidationError, match="finite number"):
        _params(json={"a": [number]})


@pytest.mark.parametrize(("method", "may"), [("GET", True), ("PUT", True), ("POST", False), ("PATCH", False)])
def test_methods_determine_whether_a_call_may_be_repeated(method, may):
    """RFC 9110 defines it, unless the author decides otherwise."""
    assert _params(method=method).may_repeat is may
    assert _params(method=method, idempotent=not may).may_repeat is not may


def test_query_values_are_encoded():
    """A value stays a value, whatever it contains."""
    params = _params(url="https://host/p?a=1", query={"q": "x&y=1 #/ü"})
    assert params.full_url == "https://host/p?a=1&q=x%26y%3D1%20%23%2F%C3%BC"


def test_parameters_survive_the_store():
    """The engine stores and reads back the same call."""
    params = _params(json={"a": [None, 1.5]}, expect=[204, "4xx"], idempotent=True, query={"q": "x"})
    assert HttpParams.model_validate(params.model_dump(mode="json", by_alias=True, exclude_none=True)) == params


def test_http_request_validates_the_authors_input():
    """It is of the kind that is asked."""
    assert isinstance(HttpRequest, TemplateChecked)


@pytest.mark.parametrize(
    "raw",
    [
        {"url": "https://host/hook"},
        {"url": "https://host:8443/hook/{{ labels.job | urlencode }}?n={{ target.node|urlencode }}"},
        {"url": "https://host/{{ unfinished"},  # told where templates are compiled
        {"headers": {"X-Job": "{{ labels.job }}"}, "bearer_from_env": "TRAINMEDIC_HTTP_PAGER"},
        {"url": 7},  # told where parameters are checked
    ],
)
def test_a_template_that_fills_in_values_is_accepted(raw):
    """Path segments and query values may come from the alert."""
    HttpRequest.check_template(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"url": "{{ labels.url }}"}, "written out"),
        ({"url": "https://{{ labels.host | urlencode }}/x"}, "written out"),
        ({"url": "https://host{{ labels.x | urlencode }}/x"}, "written out"),
        ({"url": "https://host:{{ labels.port | urlencode }}/x"}, "written out"),
        ({"url": "https://host?{{ labels.x | urlencode }}"}, "written out"),
        ({"url": "https://user@{{ 'x' | urlencode }}/"}, "written out"),
        ({"url": "https://host/{{ labels.job }}"}, "urlencode"),
        ({"url": "https://host/{{ labels.a ~ labels.b | urlencode }}"}, "urlencode"),
        ({"url": "https://host/{% if x %}a{% endif %}"}, "not statements"),
        ({"url": "https://u:p@host/"}, "bearer_from_env"),
        ({"bearer_from_env": "TRAINMEDIC_HTTP_{{ labels.x }}"}, "cannot be a template"),
        ({"method": "{% raw %}GET"}, "cannot be a template"),
        ({"headers": {"{{ labels.x }}": "1"}}, "not a header name"),
    ],
)
def test_a_template_that_lets_an_alert_choose_the_destination_is_rejected(raw, why):
    """Only the author decides where a call goes and which secret it carries."""
    with pytest.raises(ValueError, match=why):
        HttpRequest.check_template(raw)


SECRET = "TRAINMEDIC_HTTP_A"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"headers_from_env": {"X-Key": "PATH"}}, "begins with TRAINMEDIC_HTTP_"),
        ({"headers_from_env": {"Host": SECRET}}, "set by Trainmedic"),
        ({"headers_from_env": {"a b": SECRET}}, "not a header name"),
        ({"headers_from_env": {"X-Key\n": SECRET}}, "not a header name"),
        ({"headers_from_env": {"X-Key": SECRET}, "headers": {"x-key": "a"}}, "in headers and in headers_from_env"),
        ({"headers_from_env": {"Authorization": SECRET}, "bearer_from_env": SECRET}, "give one of"),
        ({"basic_auth": {"user": "a", "password_from_env": SECRET}, "bearer_from_env": SECRET}, "give one of"),
        ({"basic_auth": {"user": "a:b", "password_from_env": SECRET}}, "pattern"),
        ({"basic_auth": {"user": "a", "password": "b"}}, "password"),
        ({"socket_from_env": "/var/run/docker.sock"}, "begins with"),
        ({"certificate_from_env": "HOME"}, "begins with"),
    ],
)
def test_secrets_have_their_own_variables(given, why):
    """No other variable of the server, path or value is accepted."""
    with pytest.raises(ValidationError, match=why):
        _params(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"headers_from_env": {"X-Key": "{{ labels.a }}"}},
        {"basic_auth": {"user": "{{ labels.a }}", "password_from_env": SECRET}},
        {"ca_from_env": "{{ labels.a }}"},
        {"socket_from_env": "{{ labels.a }}"},
    ],
)
def test_an_alert_cannot_choose_a_secret(given):
    """References are constants."""
    with pytest.raises(ValueError, match="cannot be a template"):
        HttpRequest.check_template({"method": "GET", "url": "https://host/", **given})


def test_a_secret_header_may_be_authorization():
    """Services have their own schemes, such as ``Authorization: Token …``."""
    assert _params(headers_from_env={"Authorization": SECRET}).access.headers == {"Authorization": SECRET}
