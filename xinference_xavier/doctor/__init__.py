# SPDX-License-Identifier: Apache-2.0
"""``xinference-xavier doctor``: what would keep replicas from sharing, and what to do about it.

``software`` looks at versions and configuration, ``host`` at the kernel's limits, ``gpus`` at the
driver, ``ports`` at who can connect, ``server`` at a running Xinference and its replicas. ``paths``
sends real bytes between processes. Each gives findings (``finding``); ``main`` is the command.
"""

from __future__ import annotations

from xinference_xavier.doctor.main import command

__all__ = ["command"]
