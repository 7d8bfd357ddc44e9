"""JSON Schema of playbooks for editors, without checks of template names, matchers and later steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from trainmedic_logs.rules.log_rule_form import DIALECT
from trainmedic_server.catalog.fragments import KEY
from trainmedic_server.domain.fragment import Fragment, UseStep
from trainmedic_server.domain.playbook import EVERY_PHASE, Playbook, place_of
from trainmedic_server.ports.actions import Actions

_TEMPLATE = {"type": "string", "pattern": r"\{\{|\{%", "description": "A template."}
_CONSTRAINTS = ("enum", "const", "pattern", "minLength", "maxLength", "format")


def json_schema(actions: Actions) -> dict[str, Any]:
    classes = {
        name: action_class for name in actions.names() if (action_class := actions.action_class(name)) is not None
    }
    models: list[type[BaseModel]] = [Playbook, Fragment, UseStep, *(action.Params for action in classes.values())]
    refs, made = models_json_schema([(model, "validation") for model in dict.fromkeys(models)])
    definitions: dict[str, Any] = made["$defs"]
    # Elsewhere, in parameters, any value can be a template.
    language = {*_reachable(definitions, "Playbook"), "Fragment", "UseStep"}
    for name in definitions.keys() - language:
        definitions[name] = _with_templates(definitions[name])
    step = definitions["ActionStep"]
    step["properties"]["action"] = {
        "title": "Action",
        "description": "What the step does.",
        "enum": sorted(classes),
    }
    step["allOf"] = [
        {
            "if": {"properties": {"action": {"const": name}}, "required": ["action"]},
            "then": {"properties": {"with": {"description": action.summary, **refs[action.Params, "validation"]}}},
        }
        for name, action in classes.items()
    ]
    for phase in EVERY_PHASE:
        owner = next(map(str.capitalize, place_of(phase)[:-1]), "Playbook")
        listed = definitions[owner]["properties"][phase]
        kinds = listed["items"].get("oneOf", [listed["items"]])
        listed["items"] = {"oneOf": [*kinds, refs[UseStep, "validation"]]}
    either = {
        "if": {"required": [KEY]},
        "then": refs[Fragment, "validation"],
        "else": refs[Playbook, "validation"],
    }
    return {"$schema": DIALECT, "title": "Trainmedic playbook", "type": "object", **either, "$defs": definitions}


def _reachable(definitions: Mapping[str, Any], name: str, before: frozenset[str] = frozenset()) -> set[str]:
    reached = {name}
    for ref in _refs(definitions[name]):
        if ref not in before | reached:
            reached |= _reachable(definitions, ref, before | reached)
    return reached


def _refs(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [ref for each in schema for ref in _refs(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
    return own + [ref for each in schema.values() for ref in _refs(each)]


def _with_templates(schema: dict[str, Any]) -> dict[str, Any]:
    changed = dict(schema)
    if isinstance(schema.get("properties"), dict):
        changed["properties"] = {name: _or_template(each) for name, each in schema["properties"].items()}
    for place in ("items", "additionalProperties"):
        if isinstance(schema.get(place), dict):
            changed[place] = _or_template(schema[place])
    return changed


def _or_template(schema: dict[str, Any]) -> dict[str, Any]:
    # A free text allows templates already.
    if schema.get("type") == "string" and not any(each in schema for each in _CONSTRAINTS):
        return schema
    kept: dict[str, Any] = {key: each for key, each in schema.items() if key in ("title", "description", "default")}
    return {**kept, "anyOf": [_with_templates(schema), _TEMPLATE]}
