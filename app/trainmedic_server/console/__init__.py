"""The web console: server-rendered pages of API answers, without external scripts. ``app`` separates page requests from
API requests; ``inner_api`` queries the API in-process, as the page's user.
"""
