# SPDX-License-Identifier: Apache-2.0
"""The checksum finds the damage that memory and transports do."""

from __future__ import annotations

import kvcache
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, host

from xinference_xavier.store.checksum import Checksummer
from xinference_xavier.store.cuda_device import CudaDevice

SIZES = [1, 7, 8, 60, 16384, 16392, 50001]


def row(nbytes: int, *, width: int | None = None) -> torch.Tensor:
    rng = np.random.default_rng(nbytes)
    data = torch.zeros((1, width or -(-nbytes // 64) * 64), dtype=torch.uint8)
    data[0, :nbytes] = torch.from_numpy(rng.integers(0, 256, nbytes, dtype=np.uint8))
    return data


def checksum(data: torch.Tensor, nbytes: int) -> int:
    return int(Checksummer(nbytes).of(data, np.zeros(1, dtype=np.int64))[0])


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_flipped_byte_changes_it(nbytes: int) -> None:
    data, good = row(nbytes), checksum(row(nbytes), nbytes)
    summer, zero = Checksummer(nbytes), np.zeros(1, dtype=np.int64)
    positions = range(nbytes) if nbytes < 100 else [*range(0, nbytes, 997), nbytes - 1]
    for position in positions:
        for bit in (1, 128, 255):
            data[0, position] ^= bit
            assert summer.of(data, zero)[0] != good
            data[0, position] ^= bit
    assert summer.of(data, zero)[0] == good


def test_exchanged_words_change_it() -> None:
    nbytes = 50000
    data, good = row(nbytes), checksum(row(nbytes), nbytes)
    words = data.view(torch.int64)
    for i, j in [(0, 1), (5, 2048 + 5), (0, 4096), (2047, 2048), (10, 6000)]:
        words[0, [i, j]] = words[0, [j, i]]
        assert checksum(data, nbytes) != good
        words[0, [i, j]] = words[0, [j, i]]


def test_flipped_signs_of_two_floats_do_not_cancel() -> None:
    nbytes = 50000
    data, good = row(nbytes), checksum(row(nbytes), nbytes)
    for i, j in [(7, 15), (7, 16384 + 7), (3, 7), (3, 11)]:
        data[0, [i, j]] ^= 128
        assert checksum(data, nbytes) != good
        data[0, [i, j]] ^= 128


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_zeroed_block_is_noticed_and_has_a_checksum_of_its_own(nbytes: int) -> None:
    zero = torch.zeros((1, -(-nbytes // 64) * 64), dtype=torch.uint8)
    assert checksum(zero, nbytes) not in (0, checksum(row(nbytes), nbytes))


def test_a_block_shifted_by_a_row_changes_it() -> None:
    nbytes = 50000
    data = row(nbytes)
    assert checksum(data.roll(16384, dims=1), nbytes) != checksum(data, nbytes)


def test_bytes_behind_the_block_do_not_count() -> None:
    data = row(1001, width=1088)
    good = checksum(data, 1001)
    data[0, 1001:] = 255
    assert checksum(data, 1001) == good


def test_rows_are_summed_one_by_one_in_the_given_order() -> None:
    data = torch.arange(6 * 64, dtype=torch.int64).to(torch.uint8).view(6, 64)
    data[4] = data[1]
    sums = Checksummer(60).of(data, np.array([4, 0, 1], dtype=np.int64))
    assert sums[0] == sums[2] != sums[1]


def test_the_value_is_the_same_on_every_replica() -> None:
    data = torch.arange(128, dtype=torch.uint8).view(1, 128)
    assert checksum(data, 125) == -7141430246841930781


def test_slots_on_a_gpu_have_the_checksums_of_their_bytes() -> None:
    cuda = FakeCuda()
    cache = kvcache.plain_cache(5, num_blocks=20)
    memory = cuda.allocate(20 * cache.layout.slot_bytes)
    data = memory.view(20, cache.layout.slot_bytes)
    device = CudaDevice(cache.layout, cache.views, cuda)
    summer = Checksummer(cache.layout.block_bytes)
    slots = kvcache.array(*reversed(range(20)))
    device.gather(kvcache.array(*range(20)), data, slots)
    found = summer.through(device, data, slots)
    assert np.array_equal(found, summer.of(host(data), slots))
    assert len(set(found.tolist())) == 20
    device.close()
    cuda.free(memory)
    cuda.check_balanced()
