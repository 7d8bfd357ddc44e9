"""The commands of ``trainmedic``, a module each. The group that they are in is ``command``.

`main` is here for the console scripts that earlier versions installed.
"""

from trainmedic_core.command import main as main
