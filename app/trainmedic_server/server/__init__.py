"""The HTTP API, which translates requests into calls of the engine and the history.

This package knows HTTP: sizes, encodings, tokens, errors, streams. It makes no decision about alerts, which
is the engine's work, and reads no setting, which wiring hands to `factory.create_app`.
"""

import pydantic

# FastAPI makes models of its own as it is imported, most of them of the OpenAPI document, which is a fortieth of a
# server's start; each is made here when it is first needed. What is imported after this is made as ever.
pydantic.BaseModel.model_config["defer_build"] = True
try:
    import fastapi.openapi.models  # noqa: F401
finally:
    del pydantic.BaseModel.model_config["defer_build"]
