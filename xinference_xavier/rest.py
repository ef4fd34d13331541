# SPDX-License-Identifier: Apache-2.0
"""A client of the HTTP API, for the command line and the console."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ValidationError

from xinference_xavier.schemas import (
    AuditedModel,
    BudgetsRequest,
    BudgetsResult,
    ClearedModel,
    Cluster,
    ModelList,
    ModelStatus,
    Plan,
    PlanRequest,
)

Answer = TypeVar("Answer", bound=BaseModel)


class ApiError(Exception):
    """The server refused, or cannot be asked. ``status`` is the HTTP status, None without one."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The routes under ``/v1/xavier`` of the Xinference server at ``endpoint``.

    ``token`` is an API key, or the token of somebody who has logged in; clearing, limiting and
    checking need the latter. Every method raises :class:`ApiError` and waits for ``timeout_s``
    seconds at most. From any thread.
    """

    def __init__(self, endpoint: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        if not _is_url(endpoint):
            raise ApiError(None, f"endpoint={endpoint!r} is no URL such as http://127.0.0.1:9997")
        self.endpoint = endpoint.rstrip("/")
        self._token = token.strip() if token else None
        self._timeout_s = timeout_s

    def models(self) -> ModelList:
        """List the models that have GPU-first replicas."""
        return self._ask(ModelList, "GET", "models")

    def model(self, model_uid: str) -> ModelStatus:
        """Describe a model's replicas in full."""
        return self._ask(ModelStatus, "GET", f"models/{quote(model_uid, safe='')}")

    def cluster(self) -> Cluster:
        """Say what the server and its workers run."""
        return self._ask(Cluster, "GET", "cluster")

    def plan(self, request: PlanRequest) -> Plan:
        """Say what the budgets of a launch hold."""
        return self._ask(Plan, "POST", "plan", request)

    def clear(self, model_uid: str) -> ClearedModel:
        """Clear the stores of a model's replicas."""
        return self._ask(ClearedModel, "POST", f"models/{quote(model_uid, safe='')}/clear")

    def audit(self, model_uid: str) -> AuditedModel:
        """Check the bookkeeping of a model's replicas."""
        return self._ask(AuditedModel, "POST", f"models/{quote(model_uid, safe='')}/audit")

    def set_budgets(self, model_uid: str, budgets: BudgetsRequest) -> BudgetsResult:
        """Limit how much of their tiers a model's replicas use."""
        path = f"models/{quote(model_uid, safe='')}/budgets"
        return self._ask(BudgetsResult, "POST", path, budgets)

    def _ask(
        self, kind: type[Answer], method: str, path: str, body: BaseModel | None = None
    ) -> Answer:
        data = None if body is None else body.model_dump_json(exclude_none=True).encode()
        status, content = self._send(method, f"/v1/xavier/{path}", data)
        if status >= 400:
            raise ApiError(status, _refusal(status, content))
        try:
            return kind.model_validate_json(content)
        except ValidationError:
            raise ApiError(None, _no_extension(self.endpoint)) from None

    def _send(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        """Return the status and the body of the answer; ApiError where there is none."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.endpoint}{path}", data=data, headers=headers, method=method
        )
        if self._token:
            # Not for whom the server redirects to.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            try:
                response = urllib.request.urlopen(request, timeout=self._timeout_s)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                return response.status, response.read()
        except (OSError, HTTPException, ValueError) as error:
            # A token that cannot be a header is a ValueError.
            reason = getattr(error, "reason", None) or error
            if isinstance(error, HTTPException):
                reason = f"no answer in HTTP ({type(error).__name__})"
            raise ApiError(None, f"{self.endpoint} cannot be asked: {reason}") from None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        return False


def _refusal(status: int, content: bytes) -> str:
    """Return what the server says of a request that it refused, for people."""
    try:
        detail: Any = json.loads(content)["detail"]
        if isinstance(detail, list):
            detail = "; ".join(
                f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in detail
            )
    except (ValueError, KeyError, TypeError):
        detail = content.decode(errors="replace")[:200]
    if status == 404 and detail == "Not Found":
        return _no_extension("the server")
    if status == 401:
        return f"{detail}; give an API key, or the token of a login"
    return str(detail)


def _no_extension(server: str) -> str:
    return (
        f"{server} does not answer as one with this extension does; start it with "
        "XINFERENCE_EXTENSIONS=xinference_xavier.extension:create, the workers too"
    )
