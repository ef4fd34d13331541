# SPDX-License-Identifier: Apache-2.0
"""The only place that imports Xinference: GPU-first Xavier for its vLLM backend.

``XINFERENCE_EXTENSIONS=xinference_xavier.extension:create`` loads it in Xinference's API,
supervisor and worker processes. ``launch`` translates a launch, ``routes`` are those of the
API, some of them before stock ones, ``plugin`` is what Xinference talks to, and ``vllm`` holds the
model classes, which run in a replica's own process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xinference_xavier.extension.plugin import XavierExtension


def create() -> XavierExtension:
    """Return the extension, as Xinference asks for it at start.

    Raises :class:`~xinference_xavier.extension.plugin.UnsupportedVersion` when Xinference or
    xoscar is not one that this package was checked with; Xinference then does not start.
    """
    # Model processes import this package for the model classes alone: nothing else loads there.
    from xinference_xavier.extension.plugin import XavierExtension

    return XavierExtension()
