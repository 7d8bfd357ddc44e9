"""The web console: pages for people, rendered here, with no script from anywhere else.

``app`` tells pages from the API's answers, by the path and by what the client accepts, and answers them; ``pages`` says
what is on each, ``forms`` takes what people send, ``live`` tells open pages what has changed, ``sign_in`` begins
sessions. A page shows what the API says and computes nothing of its own: ``inner_api`` asks the API as a client would,
within this process and in the name of whom the page is for. ``rendering`` fills in ``templates``, with the filters of
``formats``; ``assets`` has the static files.
"""
