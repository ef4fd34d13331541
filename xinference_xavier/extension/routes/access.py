# SPDX-License-Identifier: Apache-2.0
"""What the routes have in common: scopes, and how they reach a model's replicas."""

from __future__ import annotations

from typing import Any, Final

from fastapi import HTTPException, Request, Security
from fastapi.params import Depends
from fastapi.security import SecurityScopes

from xinference_xavier.control.client import Member, directory_members
from xinference_xavier.extension.secrets import model_key
from xinference_xavier.schemas import Problem

READ: Final = "models:read"
WRITE: Final = "models:write"

Answers = dict[int | str, dict[str, Any]]

NO_MODEL: Final[Answers] = {
    404: {"model": Problem, "description": "No replica of the model is in the directory"}
}
NO_DIRECTORY: Final[Answers] = {
    503: {"model": Problem, "description": "The directory does not answer"}
}
REFUSED: Final[Answers] = {400: {"model": Problem, "description": "A value that is not allowed"}}


def needs(context: Any, scope: str) -> list[Depends]:
    """Return the dependencies of a route that needs ``scope``, where authentication is on."""
    return [Security(context.auth_service, scopes=[scope])] if context.auth_enabled else []


async def require(context: Any, request: Request, scope: str) -> None:
    """Refuse as the route itself would, for what only some requests to it need."""
    if not context.auth_enabled:
        return
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token if kind.lower() == "bearer" else None
    await context.auth_service(request, SecurityScopes([scope]), bearer)


async def members_of(supervisor: Any, model_uid: str) -> list[Member]:
    """Return a model's replicas that are in the directory."""
    address = supervisor.address
    key = await model_key(supervisor, model_uid)
    if key is None:
        return []
    try:
        return await directory_members(address, key)
    except OSError as error:
        raise HTTPException(503, f"the directory at {address} does not answer: {error}") from None


async def some_members_of(supervisor: Any, model_uid: str) -> list[Member]:
    """Return a model's replicas that are in the directory; HTTP 404 if none is."""
    members = await members_of(supervisor, model_uid)
    if not members:
        raise HTTPException(404, f"no GPU-first replica of {model_uid!r} is in the directory")
    return members
