# SPDX-License-Identifier: Apache-2.0
"""What a soak does with an engine that ends without being killed."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

from xinference_xavier.bench.engines import Engine
from xinference_xavier.soak.replicas import Replica


class Stub:
    """An engine that is ready as soon as it runs."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        waiting = [sys.executable, "-c", "input()"]
        self.process = subprocess.Popen(waiting, stdin=subprocess.PIPE)

    def ready(self) -> bool:
        return True

    def tail(self) -> str:
        return "its last words"

    def stop(self) -> None:
        assert self.process is not None
        self.process.communicate()


def test_an_engine_that_ends_by_itself_is_a_fault_and_is_replaced() -> None:
    made: list[Stub] = []

    def make(_number: int) -> Engine:
        made.append(Stub())
        return cast(Engine, made[-1])

    replica = Replica("replica-0", make)
    replica.start()
    replica.go_on()
    first = replica.serving
    assert first is not None

    made[0].stop()
    replica.go_on()
    assert replica.serving is None
    assert first.ending.is_set()
    assert replica.faults == ["replica-0 ended by itself:\nits last words"]

    replica.go_on()
    assert replica.serving is not None
    assert replica.serving.number == 2
    replica.go_on()
    assert len(replica.faults) == 1
    replica.stop()
