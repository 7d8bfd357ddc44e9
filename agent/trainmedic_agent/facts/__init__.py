"""Facts about this node: ``host`` (processors, memory, disks), ``gpu``, and ``executor`` for ``node.facts``."""
