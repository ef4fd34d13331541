# SPDX-License-Identifier: Apache-2.0
"""The console's page without a browser: what it is made of, and its calls."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.testclient import TestClient

SKIPPED = {"__type__": "update"}
"""What Gradio sends for a component that stays as it is."""


class GradioPage:
    """The page at ``path`` of an app; ``token`` is what ``token.js`` would find."""

    def __init__(self, client: TestClient, path: str = "/", token: str = "") -> None:
        self._client = client
        self._path = path
        self.token = token
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        found = re.search(r"window\.gradio_config = (\{.*?\});</script>", answer.text)
        assert found is not None
        self.config: dict[str, Any] = json.loads(found[1])
        self._events = {event["api_name"]: event for event in self.config["dependencies"]}

    def call(self, name: str, *values: Any) -> list[Any]:
        """Call one of the page's functions; return what each of its components becomes."""
        body = {
            "data": [self.token, *values],
            "fn_index": self._events[name]["id"],
            "session_hash": "session",
        }
        answer = self._client.post(f"{self._path}gradio_api/run/predict", json=body)
        assert answer.status_code == 200, answer.text
        result: list[Any] = answer.json()["data"]
        return result

    def look(self, chosen: str | None = None) -> str:
        """Return what a page that was just opened shows of the models."""
        shown: str = self.call("refresh", chosen, None)[1]
        return shown
