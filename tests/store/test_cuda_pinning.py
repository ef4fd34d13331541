# SPDX-License-Identifier: Apache-2.0
"""Host arenas are pinned, or it is told why not."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from fake_cuda import FakeCuda

from xinference_xavier.store.arena import Arena
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.pinning import Pinning, memlock_below, page_aligned


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(4, 65536, "pinned")
    yield made
    made.close()


def limit(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))


def test_all_slots_are_pinned_until_it_is_closed(arena: Arena) -> None:
    cuda = FakeCuda()
    pinning = Pinning(arena, cuda)
    assert pinning.reason is None
    assert cuda.reachable(arena.data)
    for _ in range(2):
        pinning.close()
    assert not cuda.reachable(arena.data)
    cuda.check_balanced()


def test_what_the_driver_refuses_stays_unpinned_and_is_told(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit(monkeypatch, 65536)
    cuda = FakeCuda()
    cuda.host_room = 1000
    pinning = Pinning(arena, cuda)
    assert pinning.reason == (
        "cudaHostRegister: cudaErrorMemoryAllocation (and ulimit -l (RLIMIT_MEMLOCK) is 64 KiB)"
    )
    assert "256 KiB of host memory stay unpinned" in caplog.text
    pinning.close()
    assert "host_unregister" not in cuda.names()
    cuda.check_balanced()


def test_a_low_limit_alone_refuses_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 65536)
    cuda = FakeCuda()
    pinning = Pinning(arena, cuda)
    assert pinning.reason is None
    pinning.close()
    cuda.check_balanced()


def test_an_error_of_unpinning_is_raised_once(arena: Arena) -> None:
    cuda = FakeCuda()
    pinning = Pinning(arena, cuda)
    cuda.fail("host_unregister")
    with pytest.raises(CudaError, match="host_unregister"):
        pinning.close()
    pinning.close()
    cuda.host_unregister(arena.data)
    cuda.check_balanced()


@pytest.mark.parametrize(
    ("soft", "nbytes", "told"),
    [
        (resource.RLIM_INFINITY, 1 << 40, None),
        (8 << 20, 8 << 20, None),
        (8 << 20, (8 << 20) + 1, "ulimit -l (RLIMIT_MEMLOCK) is 8 MiB"),
        (0, 1, "ulimit -l (RLIMIT_MEMLOCK) is 0 B"),
    ],
)
def test_the_limit_is_named_when_it_is_below_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, soft: int, nbytes: int, told: str | None
) -> None:
    limit(monkeypatch, soft)
    assert memlock_below(nbytes) == told


def test_page_aligned_memory_starts_at_a_page() -> None:
    memory = page_aligned(100)
    assert memory.shape == (100,)
    assert memory.data_ptr() % 4096 == 0
    assert not memory.any()
