"""Models of fragments and of the step that uses one."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trainmedic_core.fields import Identifier
from trainmedic_server.domain.inputs import MOST_INPUTS, Input, InputName
from trainmedic_server.domain.playbook import MOST_STEPS, Step
from trainmedic_server.domain.question_form import PlaybookModel


class Fragment(PlaybookModel):
    """Steps for playbooks of the same folder."""

    fragment: Identifier = Field(description="The fragment's name, unique in its folder.")
    summary: str = ""
    inputs: dict[InputName, Input] = Field(default_factory=dict, max_length=MOST_INPUTS)
    steps: tuple[Step, ...] = Field(min_length=1, max_length=MOST_STEPS)


class UseStep(PlaybookModel):
    """The steps of a fragment, in this place."""

    use: Identifier = Field(description="The fragment's name.")
    id: Identifier | None = Field(None, description="For steps['<id>.<step>']; the fragment's name by default.")
    with_: dict[InputName, Any] = Field(default_factory=dict, alias="with", description="The fragment's inputs.")
