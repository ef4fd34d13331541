# SPDX-License-Identifier: Apache-2.0
"""Users with different rights, by Xinference's own authentication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extension.stock_api import Stock, client_of, directory_of, small_index, status_of
from xinference_xavier.control.client import Contact
from xinference_xavier.extension.routes import models


class Users:
    """A real authentication service with a user per role, and the client that it guards."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from xinference.api.oauth2.advanced.auth_service import AdvancedAuthService

        self.auth = AdvancedAuthService(
            db_path=str(root / "auth.db"),
            jwt_secret_key="a" * 64,
            encryption_key="b" * 64,
            api_key_cache_enabled=False,
        )
        self.stock = Stock(ready=["m-rep0"])
        directory_of(monkeypatch, "m-rep0")
        monkeypatch.setattr(models, "peer_call", self._peer)
        self.client = client_of(self.stock, self.auth)

    async def _peer(self, contact: Contact, method: str, *args: Any, timeout_s: float) -> Any:
        done = {"cleared": True, "limited": True, "evicted_blocks": 0}
        return {**status_of(small_index()), **done}

    def token(self, *scopes: str) -> str:
        """Return the token of a user with these scopes who has logged in."""
        name = "-".join(scopes) or "nobody"
        user = self.auth.db.create_user(name, password_hash=None, permissions=list(scopes))
        token: str = self.auth.create_access_token(user, name, list(scopes))
        return token

    def api_key(self, *scopes: str) -> str:
        user = self.auth.db.create_user("keys", password_hash=None, permissions=list(scopes))
        key: str = self.auth.create_api_key_for_user(user, "test")["key"]
        return key

    def ask(self, route: tuple[str, str, Any], token: str | None) -> int:
        method, path, body = route
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return self.client.request(method, path, json=body, headers=headers).status_code
