"""Log reading: lines, rules and diagnosis, without a server. Only the commands are public.

Layers, from the top: ``cli`` > ``folder_diagnosis`` > ``simulation`` > ``rules``, ``files`` > ``diagnosis`` > ``lines``
> ``domain``.
"""

__version__ = "0.1.0"
