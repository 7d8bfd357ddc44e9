"""The web console: server-rendered pages for people, with no external scripts.

``app`` separates page requests from API requests by path and Accept header. The ``…_pages`` modules make the pages,
``forms`` and ``page_forms`` handle forms, ``live`` updates open pages, ``sign_in`` begins sessions. Pages show API
answers: ``inner_api`` queries the API in-process, as the page's user. ``rendering`` fills in ``templates`` with the
filters of ``formats``; ``assets`` has the static files.
"""
