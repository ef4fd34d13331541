# SPDX-License-Identifier: Apache-2.0
"""Order of the CUDA device's own work, on a fake CUDA that is as late as CUDA may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kvcache
import pytest
import torch
from kvcache import Cache, array

from tests.store.fake_cuda import FakeCuda, copy_spans, host
from xinference_xavier.store.checksum import Checksummer
from xinference_xavier.store.cuda import CudaError
from xinference_xavier.store.cuda_device import CudaDevice
from xinference_xavier.store.pinning import page_aligned
from xinference_xavier.transport.xoscar import Bounce

SLOTS = 9


class Kernel:
    """What runs in place of the kernel, and then something else."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __getitem__(self, _: object) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            copy_spans(*args, **constants)
            self._then()

        return run


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    made.check_balanced()


@pytest.fixture
def cache() -> Cache:
    return kvcache.plain_cache(1)


def test_the_copy_that_tries_the_kernels_undoes_no_forward(cache: Cache) -> None:
    """Between the two copies a forward in flight may fill the block, unless it came before."""
    cuda = FakeCuda(kernel=Kernel(lambda: cuda.run_compute()))
    cuda.compute(lambda: [view[0].fill_(77) for view in cache.views])
    device = CudaDevice(cache.layout, cache.views, cuda)
    assert set(cache.block(0)) == {77}
    device.close()
    cuda.check_balanced()


def test_a_kernel_that_does_not_run_is_noticed_at_the_start(cache: Cache) -> None:
    def fail() -> None:
        raise CudaError("cuLaunchKernel", "cudaErrorNoKernelImageForDevice")

    cuda = FakeCuda(kernel=Kernel(fail))
    with pytest.raises(CudaError, match="NoKernelImage"):
        CudaDevice(cache.layout, cache.views, cuda)
    cuda.check_balanced()


@pytest.fixture
def device(cuda: FakeCuda, cache: Cache) -> Iterator[CudaDevice]:
    made = CudaDevice(cache.layout, cache.views, cuda)
    yield made
    made.close()


@pytest.fixture
def slots(cuda: FakeCuda, cache: Cache) -> Iterator[torch.Tensor]:
    memory = cuda.allocate(SLOTS * cache.layout.slot_bytes)
    yield memory.view(SLOTS, -1)
    cuda.free(memory)


def pending(cuda: FakeCuda) -> int:
    return sum(len(queue.work) for queue in cuda._streams.values())


def test_a_checksum_that_fails_leaves_no_copy_behind(
    cuda: FakeCuda, cache: Cache, device: CudaDevice, slots: torch.Tensor
) -> None:
    cuda.fail("memcpy", after=1)
    summer = Checksummer(cache.layout.block_bytes)
    with pytest.raises(CudaError):
        summer.through(device, slots, array(0, 2))
    left = pending(cuda)
    device.close()  # while its target is there
    assert left == 0
    assert summer is not None


def test_slots_for_a_socket_are_there_when_it_gets_them(
    cuda: FakeCuda, device: CudaDevice, slots: torch.Tensor
) -> None:
    host(slots).fill_(7)
    bounce = Bounce(device)
    rows = bounce.start(slots, [0, 2]).result()
    left = pending(cuda)
    device.close()  # while its target is there
    bounce.close()
    assert left == 0
    assert (rows == 7).all()


def test_slots_for_a_socket_that_cannot_be_read_leave_no_copy_behind(
    cuda: FakeCuda, device: CudaDevice, slots: torch.Tensor
) -> None:
    bounce = Bounce(device)
    cuda.fail("memcpy", after=1)
    with pytest.raises(CudaError) as caught:
        bounce.start(slots, [0, 2]).result()
    left = pending(cuda)
    device.close()  # while its target is there: the error's frames hold it
    bounce.close()
    assert left == 0
    assert caught.tb is not None


def test_a_copy_through_the_scratch_area_that_fails_leaves_it_to_the_next(
    cuda: FakeCuda, cache: Cache, device: CudaDevice
) -> None:
    pageable = page_aligned(SLOTS * cache.layout.slot_bytes).view(SLOTS, -1)
    cuda.fail("launch")
    with pytest.raises(CudaError):
        device.scatter(pageable, array(0, 2), array(1, 2))
    assert pending(cuda) == 0


def test_closing_waits_for_what_a_lost_fence_left(
    cuda: FakeCuda, cache: Cache, slots: torch.Tensor
) -> None:
    device = CudaDevice(cache.layout, cache.views, cuda)
    device.gather(array(1), slots, array(0))
    cuda.calls.clear()
    device.close()
    names = cuda.names()
    assert names.index("event_synchronize") < names.index("host_unregister")
