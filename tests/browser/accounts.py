# SPDX-License-Identifier: Apache-2.0
"""The users of the server.

Each has a launch history of its own: dialogs that :data:`ADMIN` opens are empty as long as only
:data:`OPERATOR` launches.
"""

from __future__ import annotations

import re
from typing import Any

import requests

from tests.extension.server import XinferenceServer

ADMIN = "admin"
OPERATOR = "operator"
READER = "reader"
PERMISSIONS = {
    OPERATOR: ["models:list", "models:read", "models:write"],
    READER: ["models:list", "models:read"],
}
PASSWORD = "correct horse battery staple"


class Accounts:
    """Sets up a server's users, and sends requests as one of them."""

    def __init__(self, server: XinferenceServer) -> None:
        self.url = server.url
        self._tokens: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        token = re.search(rb"Setup token: (\S+)", server.output.read_bytes())
        assert token is not None
        first = {"username": ADMIN, "password": PASSWORD, "setup_token": token[1].decode()}
        assert requests.post(f"{self.url}/v1/admin/setup", json=first, timeout=30).ok
        server.client._set_token(self.token(ADMIN))
        for user, permissions in PERMISSIONS.items():
            body = {"username": user, "password": PASSWORD, "permissions": permissions}
            self.request("POST", "/v1/admin/users", json=body)

    def token(self, user: str) -> str:
        """Return a user's access token, as the web UI gets it at login."""
        if user not in self._tokens:
            login = {"username": user, "password": PASSWORD}
            answer = requests.post(f"{self.url}/token", json=login, timeout=30)
            assert answer.ok, answer.text
            self._tokens[user] = answer.json()["access_token"]
        return self._tokens[user]

    def api_key(self, user: str) -> str:
        """Return an API key of a user."""
        if user in self._keys:
            return self._keys[user]
        [owner] = [u for u in self.request("GET", "/v1/admin/users") if u["username"] == user]
        body = {"owner": owner["id"], "name": f"key of {user}"}
        self._keys[user] = self.request("POST", "/v1/admin/keys", json=body)["key"]
        return self._keys[user]

    def send(self, method: str, path: str, token: str | None, **more: Any) -> requests.Response:
        """Send a request with a token, or without one."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return requests.request(method, self.url + path, headers=headers, timeout=120, **more)

    def request(self, method: str, path: str, **more: Any) -> Any:
        """Send a request as the administrator that must succeed; return what it answers."""
        answer = self.send(method, path, self.token(ADMIN), **more)
        assert answer.ok, answer.text
        return answer.json()
