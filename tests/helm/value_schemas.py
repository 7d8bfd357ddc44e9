"""Definitions of `values.schema.json` that follow the code: settings as variables, the agent's policy, messages.

Helm checks them when it renders, so that a misspelt variable or a duration without a unit is refused before a pod
starts. `test_values` compares the file with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainmedic_agent.disk.rules import AgeBy, CleaningOperation, CleaningPolicy, CleaningRule, EntryKind
from trainmedic_agent.log_reading.log_policy import LogsPolicy
from trainmedic_agent.log_shipping.ship_policy import ShipPolicy
from trainmedic_agent.settings import agent, agent_reader
from trainmedic_core import duration
from trainmedic_core.setting_sources import SettingSource
from trainmedic_server.domain.message import MessageKind, Severity
from trainmedic_server.settings import server

Schema = dict[str, Any]
_LONGEST_LINE = 110
_ANY: Schema = {"type": ["string", "number", "boolean"]}
# Helm's regular expressions know no lookahead. An empty variable counts as unset.
_DURATION: Schema = {"type": "string", "pattern": duration.PATTERN.replace("(?=.)", "").replace(r"\d", "[0-9]")}
_BOOLEAN: Schema = {
    "type": ["boolean", "string"], "pattern": "^([Tt]rue|TRUE|[Ff]alse|FALSE|[Yy]es|[Nn]o|[Oo]n|[Oo]ff|[01tfyn])?$"
}  # fmt: skip


def definitions() -> dict[str, Schema]:
    """Return each generated definition by its name."""
    of_agent = {name: setting.source for name, setting in agent.SETTINGS.items()}
    return {
        "serverSettings": _settings(server.SOURCES, _server_types()),
        "serverEnv": _environment(server.SOURCES.values()),
        "agentSettings": _settings(of_agent, _agent_types()),
        "agentEnv": _environment(of_agent.values()),
        "readerSettings": _settings({name: of_agent[name] for name in agent_reader.NAMES}, _agent_types()),
        "cleaningPolicy": _mapping(CleaningPolicy, rules={"$ref": "#/definitions/cleaningRules"}),
        "cleaningRules": {"type": "object", "additionalProperties": {"$ref": "#/definitions/cleaningRule"}},
        "cleaningRule": {
            **_mapping(
                CleaningRule,
                min_age={"$ref": "#/definitions/duration"},
                kind={"enum": [*EntryKind]},
                do={"enum": [*CleaningOperation]},
                age_by={"enum": [*AgeBy]},
            ),
            "required": ["roots"],
        },
        "logsPolicy": _mapping(LogsPolicy, ship={"$ref": "#/definitions/shipPolicy"}),
        "shipPolicy": _mapping(ShipPolicy, oldest={"$ref": "#/definitions/duration"}),
        "messageKinds": {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: {"$ref": "#/definitions/messageRule"} for name in ("all", *MessageKind)},
        },
        "messageRule": {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "properties": {
                # YAML reads on and off as booleans.
                "severity": {"enum": ["on", "off", True, False, *Severity]},
                "channels": {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/channel"}},
            },
        },
    }


def _settings(sources: Mapping[str, SettingSource], types: Mapping[str, Schema]) -> Schema:
    """Return the schema of settings by variable."""
    given = dict.fromkeys(sorted(_variables(sources.values())), _ANY)
    typed = {sources[name].variable: schema for name, schema in types.items() if name in sources}
    families = [source.variable for source in sources.values() if source.family]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**given, **typed},
        "patternProperties": {f"^{family}[A-Z0-9_]+$": _ANY for family in families},
    }


def _environment(sources: Iterable[SettingSource]) -> Schema:
    """Return the schema of variables in Kubernetes' form. Names without our prefix are other programs'."""
    given = list(sources)
    names: list[Schema] = [{"enum": sorted(_variables(given) | server.OF_OTHER_PROGRAMS)}]
    names += [{"pattern": f"^{source.variable}"} for source in given if source.family]
    return {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
            "if": {"properties": {"name": {"pattern": "^TRAINMEDIC_"}}},
            "then": {"properties": {"name": names[0] if len(names) == 1 else {"anyOf": names}}},
        },
    }


def _variables(sources: Iterable[SettingSource]) -> set[str]:
    given = [source for source in sources if not source.family]
    return {source.variable for source in given} | {
        f"{source.variable}_FILE" for source in given if source.can_be_a_file
    }


def _server_types() -> dict[str, Schema]:
    """Return the schema of each of the server's settings that is not free text."""
    schema = server.ServerSettings.model_json_schema()
    types = {name: _type(found, schema.get("$defs", {})) for name, found in schema["properties"].items()}
    return {name: found for name, found in types.items() if found}


def _type(found: Schema, definitions: Mapping[str, Schema]) -> Schema:
    if "$ref" in found:
        found = definitions[found["$ref"].rpartition("/")[2]]
    if "enum" in found:
        return {"enum": ["", *(form for value in found["enum"] for form in (value, value.upper(), value.title()))]}
    if found.get("pattern") == duration.PATTERN:
        return _DURATION
    match found.get("type"):
        case "boolean":
            return _BOOLEAN
        case "integer" | "number" as kind:
            bounds = {name: value for name, value in found.items() if re.search("minimum|maximum", name.lower())}
            return {"type": [kind, "string"], "pattern": "^[0-9.]*$", **bounds}
    return {}


def _agent_types() -> dict[str, Schema]:
    levels = [form for level in agent.LOG_LEVELS for form in (level, level.upper(), level.title())]
    return {
        "log_level": {"enum": ["", *levels]},
        "reader": {"enum": ["", *agent.ReaderStart]},
        "reader_memory": {"type": ["integer", "string"], "pattern": "^[0-9]*$"},
    }


def _mapping(struct: Any, **types: Schema) -> Schema:
    """Return the schema of a part of the policy with these fields."""
    names = [name for name in struct.__struct_fields__ if name != "name"]
    return {"type": "object", "additionalProperties": False, "properties": {**{key: {} for key in names}, **types}}


def written() -> str:
    """Return the definitions as the file has them."""
    return "".join(f'    "{name}": {_text(schema, 4)},\n' for name, schema in definitions().items())


def _text(value: Any, indent: int) -> str:
    """Return `value` as JSON: on one line if it fits, so that a new setting is one new line."""
    line = json.dumps(value)
    if len(line) + indent <= _LONGEST_LINE or not isinstance(value, dict | list):
        return line
    inner = indent + 2
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_text(member, inner)}" for key, member in value.items()]
    else:
        parts = [_text(member, inner) for member in value]
    body = ",\n".join(" " * inner + part for part in parts)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{body}\n{' ' * indent}{end}"
