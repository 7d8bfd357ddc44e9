"""The HTTP API, which translates requests into calls of the engine and the history.

This package knows HTTP: sizes, encodings, tokens, errors, streams. It makes no decision about alerts, which
is the engine's work, and reads no setting, which wiring hands to `factory.create_app`.
"""

import pydantic

# FastAPI makes the models of the OpenAPI document as it is imported, which is a fortieth of a server's start, and needs
# them only when somebody asks for that document. What is imported after this is made as ever.
pydantic.BaseModel.model_config["defer_build"] = True
try:
    import fastapi.openapi.models  # noqa: F401
finally:
    del pydantic.BaseModel.model_config["defer_build"]
