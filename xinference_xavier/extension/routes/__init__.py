# SPDX-License-Identifier: Apache-2.0
"""Our routes in Xinference's REST API.

``launch`` stands before stock routes; what lies below ``/v1/xavier`` is our own: ``models``,
``plan`` and ``cluster``. Everything asks for Xinference's own scopes.
"""

from __future__ import annotations

from typing import Any

from xinference_xavier.extension.routes import cluster, launch, models, plan

__all__ = ["add_routes"]


def add_routes(context: Any) -> None:
    """Add the routes to an ``APIExtensionContext``. Must run before the stock routes exist."""
    for module in (launch, models, plan, cluster):
        module.add_routes(context)
