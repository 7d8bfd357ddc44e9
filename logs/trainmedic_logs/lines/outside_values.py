"""Distinction of errors about the program's own names and settings from errors about external values.

Samples and server answers can raise in the program's own file, so the shown source decides.
"""

from __future__ import annotations

import re

_SETTINGS = (
    r"(?:self\.)?(?:\w+\.)*?(?:\w*_)?(?:conf(?:ig)?s?|cfg|args|h?params|hyper\w*|settings|kwargs|defaults)"
    r"|[A-Z][A-Z0-9_]+"
)
_IS_SETTINGS = re.compile(rf"(?:{_SETTINGS})$")
_LITERAL_KEYS = re.compile(r"([A-Za-z_][\w.]*)((?:\[\s*f?(?:\"[^\"\n]*\"|'[^'\n]*')\s*\])+)")
_POPPED = re.compile(r"([A-Za-z_][\w.]*)\.(?:pop|__getitem__)\(\s*(\"[^\"\n]*\"|'[^'\n]*')\s*\)")
_LITERAL = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
# `*value` or `**value` in a call.
_UNPACKED = re.compile(r"[(,]\s*\*{1,2}\s*([A-Za-z_][\w.]*)")
_NO_ATTRIBUTE = re.compile(r"^'(\w+)' object has no attribute '(\w+)'")
_CONDITION = re.compile(r"^assert\b(?P<condition>[^\"'\n]*)", re.MULTILINE)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*")
# A subscript, or a method that raises KeyError.
_READS_MEMBER = re.compile(r"[\w\])]\s*\[|\.(?:pop|popitem|remove|__getitem__|__delitem__|move_to_end)\(")
_QUOTED_NAME = re.compile(r"(['\"])[A-Za-z_][\w.-]*\1$")
_ENVIRONMENT_VARIABLE = re.compile(r"['\"](?:[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK|HOSTNAME|HOME|USER|PATH)['\"]$")
_BUILTIN_TYPE = re.compile(r"\b(?:str|int|float|bool|bytes|list|dict|tuple|set)\b")
# TypeErrors about a str or bytes value that do not name its type.
_TEXT_ERRORS = re.compile(
    r"^(?:string|byte) ind|^expected string or|JSON object must be|^can only concatenate|^sequence item"
)
# Source that names nothing, after its strings were replaced.
_ONLY_LITERALS = re.compile(r"^[^A-Za-z_]+$")
_OPERATORS = frozenset({"and", "or", "not", "in", "is", "None", "True", "False"})
# Sizes that a program sets itself, though no settings object shows it.
_MODEL_SIZE = re.compile(
    r"(?:\w*_)?(?:heads?|hidden(?:_size|_dim)?|n_embd|d_model|layers?|experts?|stages?|micro_?batch\w*|batch_size"
    r"|accum\w*|(?:tensor|pipeline|context|expert|data|sequence)_?(?:model_)?parallel\w*|tp(?:_size)?|pp(?:_size)?"
    r"|cp(?:_size)?|ep(?:_size)?)$"
)
_DIVISIBLE = re.compile(r"\bdivisible\b|\bdivide\b")
# Words for what files, requests or machines bring in.
_FROM_OUTSIDE = re.compile(
    r"(?i)\b(?:files?|suffix|ext(?:ension)?s?|formats?|mime\w*|codecs?|images?|audio|video|modalit\w*|columns?|fields?"
    r"|samples?|rows?|records?|inputs?|outputs?|tokens?|labels?|responses?|repl(?:y|ies)|answers?|status|codes?|urls?"
    r"|http\w*|versions?|headers?|messages?|roles?|languages?|kind|devices?|platforms?|drivers?|os|systems?)\b|\.\w{2,5}$"
)


def is_own(name: str, message: str, shown: str) -> bool:
    """Return whether error `name` concerns the program's own names. `shown`: source of the raising call."""
    if name == "KeyError":
        return _is_own_key(message.strip(), shown)
    if name == "AttributeError":
        return _is_own_attribute(message, shown)
    if name == "TypeError":
        return _is_own_type(message, shown)
    if name == "AssertionError":
        return _is_own_check(message, shown)
    if name == "NotImplementedError":
        return not _FROM_OUTSIDE.search(f"{message}\n{shown}".strip())
    return name in ("NameError", "UnboundLocalError")


def unpacks_outside(shown: str) -> bool:
    """Return whether a call unpacks something else than settings."""
    return any(not _IS_SETTINGS.match(each) for each in _UNPACKED.findall(shown))


def _is_own_key(key: str, shown: str) -> bool:
    if not _QUOTED_NAME.match(key) or _ENVIRONMENT_VARIABLE.match(key):
        return False
    if not _READS_MEMBER.search(shown):
        return True  # no subscript, so a function's keyword or name was missing
    owners = [name for name, keys in _LITERAL_KEYS.findall(shown) if _has_key(keys, key)]
    owners += [name for name, literal in _POPPED.findall(shown) if _has_key(literal, key)]
    return bool(owners) and all(_IS_SETTINGS.match(each) for each in owners)


def _has_key(source: str, key: str) -> bool:
    return any(literal[1:-1] == key[1:-1] for literal in _LITERAL.findall(source))


def _is_own_attribute(message: str, shown: str) -> bool:
    missing = _NO_ATTRIBUTE.match(message)
    if missing is None or _BUILTIN_TYPE.fullmatch(missing[1]):
        return False
    owners = re.findall(rf"([A-Za-z_][\w.]*|[\])])\.{missing[2]}\b", shown)
    return all(each == "self" or _IS_SETTINGS.match(each) for each in owners)


def _is_own_type(message: str, shown: str) -> bool:
    is_of_value = _BUILTIN_TYPE.search(message) or _TEXT_ERRORS.search(message)
    return not is_of_value or bool(_ONLY_LITERALS.match(_LITERAL.sub("0", shown)))


def _is_own_check(message: str, shown: str) -> bool:
    checks = _CONDITION.findall(shown)
    if not checks:
        return bool(_DIVISIBLE.search(message)) and not _FROM_OUTSIDE.search(message)
    names = [name for name in _NAME.findall(checks[-1]) if name not in _OPERATORS]
    return bool(names) and all(_is_setting(name) for name in names)


def _is_setting(name: str) -> bool:
    owner, _, member = name.rpartition(".")
    return bool(_MODEL_SIZE.match(member) or (owner and _IS_SETTINGS.match(owner)))
