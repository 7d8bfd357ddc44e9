from __future__ import annotations

import contextlib
from typing import Any, Iterator


@contextlib.contextmanager
def replaced(holder: Any, **members: Any) -> Iterator[None]:
    before = {name: getattr(holder, name) for name in members}
    own = getattr(holder, "__dict__", {})
    inherited = members.keys() - own.keys()
    for name, value in members.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if name in inherited and name in own:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
