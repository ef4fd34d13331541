# SPDX-License-Identifier: Apache-2.0
"""The connector of the engines that are killed: ours, with copies that can be held.

vLLM imports this module in each of an engine's processes. While the file ``hold-load`` (or
``hold-save``) lies in the folder that ``held.FOLDER`` names, a thread that is about to copy into
KV blocks (or out of them) waits, and leaves ``held-load`` (``held-save``) there as a sign.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from tests.crash.held import FOLDER
from xinference_xavier.store.device import CpuDevice
from xinference_xavier.vllm import connector


def _let_hold(name: str, thread: str, what: str) -> None:
    original = getattr(CpuDevice, name)
    folder = Path(os.environ[FOLDER])

    def held(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name.startswith(thread):
            while (folder / f"hold-{what}").exists():
                (folder / f"held-{what}").touch()
                time.sleep(0.005)
        return original(*args, **kwargs)

    setattr(CpuDevice, name, held)


_let_hold("scatter", "xavier-load", "load")
_let_hold("gather", "xavier-copy", "save")


class XavierConnector(connector.XavierConnector):
    """The product's connector; what it copies with was wrapped above."""
