"""``trainmedic completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from trainmedic_core.cli.choice import NearestChoice


@click.command()
@click.argument("shell", type=NearestChoice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  trainmedic completion bash > ~/.local/share/bash-completion/completions/trainmedic
    zsh:   trainmedic completion zsh > "${fpath[1]}/_trainmedic"
    fish:  trainmedic completion fish > ~/.config/fish/completions/trainmedic.fish
    """
    shape = get_completion_class(shell)
    assert shape is not None
    script = shape(ctx.find_root().command, {}, "trainmedic", "_TRAINMEDIC_COMPLETE")
    # `source()` would run bash to learn its version.
    click.echo(script.source_template % script.source_vars())
