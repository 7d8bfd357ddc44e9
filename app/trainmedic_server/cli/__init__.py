"""The commands of ``trainmedic``, a module each. The group that they are in is ``command``."""
