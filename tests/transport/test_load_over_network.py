# SPDX-License-Identifier: Apache-2.0
"""The load engine over the real fetching transports, from another process through staging slots."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from store_peer import Peer, content, make_cache

from tests.waiting import WAIT_S, drain
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.device import CpuDevice
from xinference_xavier.store.jobs import LoadJob, LoadSegment, SegmentResult, Tier
from xinference_xavier.transport.loader import LoadEngine
from xinference_xavier.transport.select import Transports

H, D = int(Tier.HOST), int(Tier.DEVICE)


class Reader:
    """A worker with a host arena of two slots, both for staging."""

    def __init__(self, choice: str) -> None:
        self.peer = Peer(choice)
        self.tensor, self.layout, views = make_cache()
        self.arena = Arena.create(2, self.layout.slot_bytes, "reader")
        self.transports = Transports.start(
            choice=choice,
            arenas={Tier.HOST: self.arena},
            staging={Tier.HOST: range(2)},
            host="127.0.0.1",
            layout_digest=self.layout.digest(),
        )
        self.engine = LoadEngine(
            layout=self.layout,
            arenas={Tier.HOST: self.arena},
            device=CpuDevice(self.layout, views),
            verify="off",
            staging={Tier.HOST: range(2)},
            transports=self.transports,
        )

    def load(self, *rows: tuple[int, int, int, int], timeout_s: float = WAIT_S) -> SegmentResult:
        segment = LoadSegment(1, np.array(rows, dtype=np.int64))
        self.engine.submit(LoadJob(1, "r", (segment,), timeout_s), {1: self.peer.handle})
        (result,) = drain(self.engine)
        return result.segments[0]

    def close(self) -> None:
        self.engine.close(WAIT_S)
        self.transports.close()
        self.arena.close()
        self.peer.close()


@pytest.fixture(params=["nixl", "xoscar"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(request.param)
    yield made
    made.close()


def test_blocks_arrive_whole_or_are_reported(reader: Reader) -> None:
    slots = [5, 1, 0, 6]
    rows = [(D if i % 2 else H, slot, slot + 1, i) for i, slot in enumerate(slots)]
    result = reader.load(*rows)
    assert (result.failed_rows, result.reason) == (set(), None)
    for block, slot in enumerate(slots):
        expected = content(slot + 1, reader.layout).tobytes()
        assert reader.tensor[block].numpy().tobytes() == expected

    reader.peer.ask("write", H, 3, 77)
    before = reader.tensor[5].clone()
    result = reader.load((H, 2, 3, 4), (H, 3, 4, 5))
    assert (result.failed_rows, result.reason) == ({1}, "generation")
    assert reader.tensor[5].equal(before)

    reader.peer.kill()
    start = time.monotonic()
    result = reader.load((H, 2, 3, 4), (H, 1, 2, 5), timeout_s=3.0)
    assert result.failed_rows == {0, 1}
    assert result.reason in {"transfer", "timeout", "unavailable"}
    assert time.monotonic() - start < WAIT_S
    assert reader.tensor[5].equal(before)
