"""Values of a program that come from outside: answers of servers, samples, checkpoints, the environment, the machine.

An exception about such a value proves nothing against the program, although the program raised it in its own file. The
source that a traceback shows below its last call names the value; see ``exception_causes``.
"""

from __future__ import annotations

import re

_ANSWERS = (
    r"resp\w*|repl(?:y|ies)|r|res|results?|answers?|bod(?:y|ies)|payload|msgs?|messages?|requests?|req|outputs?|out"
    r"|completions?|choices?|generations?|client|session|http\w*|api|queue|q|event|packet|sock\w*|conn\w*|proc\w*"
    r"|job|task|future|actor|handle|status"
)
_DATA = (
    r"data(?:set|sets|_dict|_item)?|samples?|rows?|records?|examples?|items?|batch(?:es)?|lines?|docs?|documents?|entry"
    r"|entries|inputs?|features?|columns?|anno\w*|meta\w*|manifest|header|index|obj|json_\w+|js|parsed|loaded|content"
    r"|texts?|conversations?|turns?"
)
_STATE = r"ckpt\w*|checkpoint\w*|\w*state(?:_dict|s)?|saved|snapshot|weights|env(?:iron\w*)?|stats?|info"
_NAMES = re.compile(
    rf"(?<![\w.])(?:self\.)?(?:{_ANSWERS}|{_DATA}|{_STATE})(?=\s*(?:\[|\.|\)|,|$| (?:is|in|==|!=|[<>])))"
)
_CALLS = re.compile(
    r"\.json\(|json\.loads?\(|os\.environ|getenv|\.recv\w*\(|\.read\w*\(|\.get\(timeout|\.generate\(|\.request\w*\("
    r"|\.post\(|\.fetch\w*\(|ray\.get\(|torch\.load\(|pickle\.loads?\(|\.result\(|next\(|subprocess|\.text\b|\.stdout"
    r"|\.content\b|yaml\.(?:safe_)?load"
)
_SUBSCRIPT = re.compile(r"([A-Za-z_][\w.]*(?:\([^()]*\))?)\s*\[\s*f?[\"']")
_OWN_MAPPINGS = re.compile(
    r"(?:^|[._])(?i:conf(?:ig)?s?|cfg|args|opts?|options|params|h?params|hyper\w*|settings|kwargs|defaults|registry"
    r"|\w*_(?:config|cfg|args|kwargs|map|registry|table|factory|classes))$|^[A-Z][A-Z0-9_]+$"
)
"""Names of mappings that a program fills itself."""
_VARIABLE = re.compile(r"^['\"][A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+['\"]$|^['\"](?:RANK|HOSTNAME|HOME|USER|PATH)['\"]$")
"""Message of a KeyError about a variable of the environment."""
_OF_A_TYPE = re.compile(
    r"^(?:string|list|byte|tuple) ind(?:ices|ex) must be|^'(?:str|list|float|bytes|bool|NoneType)' object has no attr"
    r"|^expected string or bytes-like|^'(?:str|float|NoneType|bool|int)' object is not (?:subscriptable|iterable)"
    r"|^the JSON object must be|^float\(\) argument must be|^int\(\) argument must be|^argument of type 'NoneType'"
    r"|^sequence item \d+: expected str|^can only concatenate str"
)
"""Messages about a value of another type than expected, as of a parsed answer or a field that is missing."""
_CHECKS_ITSELF = re.compile(
    r"(?i)\bdivisible\b|\bdivide\b|%|\bdtypes?\b|isinstance\(|\bhidden\w*"
    r"|\bheads?\b|\blayers?\b|\bconf(?:ig\w*)?\b|\bcfg\b|\bargs\b|\bhparams\b|\barguments?\b|\boptions?\b|\bflags?\b"
    r"|\bmust (?:be|have|match)\b|\bcannot be (?:used|combined|set)\b|\bnot supported\b|\bunsupported\b|\bmutually\b"
    r"|\bbatch[ _]size\b|\bmicro\w*|\bparallel\w*|\bunknown (?:mode|model|optimizer|loss|type)\b"
)
"""Words of assertions about the program's own settings. A shape may be that of a sample."""
_OF_THE_WORLD = re.compile(
    r"(?i)\b(?:world|ranks?|timed?[ _]?out|return_?code|status\w*|exit\w*|alive|vocab\w*|tokens?|labels?|samples?|rows?"
    r"|files?|path|url|http\w*|server|version|len|lengths?|empty|missing|corrupt\w*|checksum|hash|seed|found|got 0)\b"
    r"|get_world_size|get_rank"
)


def concerns(name: str, message: str, shown: str) -> bool:
    """Return whether the exception `name` with `message` is about a value that may come from outside. `shown` is the
    source of the call that raised it, empty if it is not known."""
    if name == "KeyError":
        return bool(_VARIABLE.match(message.strip())) or _reads_outside(shown)
    if name == "AssertionError":
        return not _is_own_check(f"{shown}\n{message}")
    if _OF_A_TYPE.match(message):
        return True
    if name in ("TypeError", "AttributeError"):
        return _reads_outside(shown)
    return False


def _reads_outside(shown: str) -> bool:
    """Return whether the source subscripts a mapping that is not the program's own."""
    subscripted = _SUBSCRIPT.findall(shown)
    if any(not _OWN_MAPPINGS.search(each) for each in subscripted):
        return True
    return bool(_CALLS.search(shown) or (not subscripted and "[" in shown and _NAMES.search(shown)))


def _is_own_check(text: str) -> bool:
    """Return whether an assertion is about the program's own settings or arguments."""
    if not _CHECKS_ITSELF.search(text) or _CALLS.search(text):
        return False
    is_of_world = _OF_THE_WORLD.search(text) or _NAMES.search(text)
    return not is_of_world or bool(re.search(r"(?i)\bdivisible\b|%|\bmust divide\b", text))
