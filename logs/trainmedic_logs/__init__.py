"""Reading logs: what lines say, which rule takes them, and who began a failure. It works without a server.

Layers, from the top: ``cli`` > ``folder_diagnosis`` > ``simulation`` > ``rules``, ``files`` > ``diagnosis`` > ``lines``
> ``domain``. Its commands are what is promised; what it imports as may change in any version.
"""

__version__ = "0.1.0"
