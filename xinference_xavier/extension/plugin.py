# SPDX-License-Identifier: Apache-2.0
"""The object that Xinference talks to, in its API, supervisor and worker processes."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from xinference_xavier import __version__
from xinference_xavier.extension.console import add_console
from xinference_xavier.extension.names import (
    FINAL_REPORTS,
    GROUP_SECRET,
    KEEP_SECRET,
    NAME,
    RECORD_FINAL,
)
from xinference_xavier.extension.registration import register_model_classes
from xinference_xavier.extension.routes import add_routes
from xinference_xavier.extension.secrets import Secrets
from xinference_xavier.extension.web import add_script
from xinference_xavier.installed import require

MOST_REPORTS: Final = 64


class XavierExtension:
    """Hooks of Xinference's extension interface, version 1. Each hook returns at once."""

    name = NAME
    api_version = 1

    def __init__(self) -> None:
        for distribution in ("xinference", "xoscar"):
            require(distribution)
        register_model_classes()
        self._final: deque[dict[str, Any]] = deque(maxlen=MOST_REPORTS)
        self._secrets = Secrets()

    def configure_api(self, context: Any) -> None:
        """Put our routes and the console before the stock ones, and our script into the pages.

        API process, at its start.
        """
        add_routes(context)
        add_console(context.app)
        add_script(context.app)

    def worker_metadata(self) -> dict[str, str]:
        """Return what the supervisor knows of this worker. Worker process."""
        # Here, because only workers call this hook, before they have any model.
        from xinference_xavier.extension.exporter import install

        install()
        return {"version": __version__}

    def filter_worker_resources(
        self, worker: dict[str, Any], workers: list[dict[str, Any]]
    ) -> list[int]:
        """Return the worker's devices as they are. Supervisor process."""
        devices: list[int] = worker["gpu_devices"]
        return devices

    def control_operation(self, operation: str, payload: dict[str, Any]) -> Any:
        """Keep or return final counters of closed replicas, or models' secrets. Supervisor process.

        Both live as long as the supervisor, the newest :data:`MOST_REPORTS` counters of them.
        """
        if operation == KEEP_SECRET:
            return self._secrets.keep(payload["model_uid"], payload["secret"])
        if operation == GROUP_SECRET:
            return self._secrets.get(payload["model_uid"])
        if operation == RECORD_FINAL:
            self._final.append(payload)
            return None
        if operation == FINAL_REPORTS:
            uid = payload["model_uid"]
            return [report for report in self._final if report["model_uid"] == uid]
        raise ValueError(f"{NAME} has no operation {operation!r}")
