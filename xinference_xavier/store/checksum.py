# SPDX-License-Identifier: Apache-2.0
"""A 64-bit checksum of slots, for ``xavier_verify=checksum``.

A weighted sum of the slot's 64-bit words, modulo 2**64. Every weight is odd, so a change of one
word always changes the sum; weights differ, so exchanged words do too; and each word's high half
is folded into its low half first, so that changes of high bits alone (the signs of floats) cannot
cancel. It finds faults of memory and transport, and is no protection against an attacker.

numpy does the arithmetic in the calling thread, at about the speed of a copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from xinference_xavier.layout import BlockLayout
from xinference_xavier.store.device import Device, IntArray

Mask = npt.NDArray[np.bool_]

_Words = npt.NDArray[np.uint64]

_STRIDE = 2048
"""Words that share one vector of weights (16 KiB, it stays in the first-level cache)."""

_READ_SLOTS = 16
"""Slots in a device's memory that are brought to the host at a time."""

_VERIFY_SLOTS = 16
"""KV blocks that are compared at a time."""

_SEED = np.uint64(0x9AE16A3B2F90404F)
_U32 = np.uint64(32)


def _odd_weights(count: int, salt: int) -> _Words:
    """Return ``count`` odd pseudo-random words, the same in every version of numpy."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: _Words = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return weights


_INNER = _odd_weights(_STRIDE, 1)


class Checksummer:
    """Checksums of the first ``nbytes`` bytes of slots. Not thread-safe: one per thread.

    Results are equal on all replicas with equal ``nbytes``, and never 0: in an arena's ``meta``
    0 means that no checksum was recorded.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._read: torch.Tensor | None = None
        words = -(-nbytes // 8)
        rows = -(-words // _STRIDE)
        # Words past the end stay zero and add nothing.
        self._scratch = np.zeros((rows, _STRIDE), dtype=np.uint64)
        self._outer = _odd_weights(rows, 2)

    def through(self, device: Device, data: torch.Tensor, slots: IntArray) -> IntArray:
        """Return :meth:`of` slots wherever they are; those on a GPU are copied to the host first.

        Waits for copies that the thread has started before.
        """
        if not data.is_cuda:
            return self.of(data, slots)
        if self._read is None:
            self._read = torch.empty((_READ_SLOTS, data.shape[1]), dtype=torch.uint8)
        found = np.empty(len(slots), dtype=np.int64)
        for start in range(0, len(slots), _READ_SLOTS):
            part = slots[start : start + _READ_SLOTS]
            places = np.arange(len(part), dtype=np.int64)
            try:
                device.move(data, part, self._read, places)
            finally:
                device.fence()
            found[start : start + len(part)] = self.of(self._read, places)
        return found

    def of(self, data: torch.Tensor, slots: IntArray) -> IntArray:
        """Return int64 ``[len(slots)]``, the checksums of rows of uint8 ``[N, >= nbytes]``.

        The rows are in host memory, contiguous, at addresses that are multiples of 8.
        """
        array = data.numpy()
        sums = np.fromiter(
            (self._one(array[slot]) for slot in slots), dtype=np.uint64, count=len(slots)
        )
        sums ^= _SEED
        sums[sums == 0] = 1
        result: IntArray = sums.view(np.int64)
        return result

    def _one(self, row: npt.NDArray[np.uint8]) -> int:
        whole = self._nbytes // 8
        words = row[: whole * 8].view(np.uint64)
        flat = self._scratch.reshape(-1)
        np.right_shift(words, _U32, out=flat[:whole])
        np.bitwise_xor(words, flat[:whole], out=flat[:whole])
        if whole * 8 < self._nbytes:
            tail = row[whole * 8 : self._nbytes].tobytes()
            flat[whole] = int.from_bytes(tail, "little")
        # Array products wrap around silently, as meant.
        return int(((self._scratch @ _INNER) * self._outer).sum(dtype=np.uint64))


class Verifier:
    """Compares KV blocks with the checksums of slots. One per thread."""

    def __init__(self, layout: BlockLayout, device: Device) -> None:
        self._device = device
        self._scratch = torch.zeros((_VERIFY_SLOTS, layout.slot_bytes), dtype=torch.uint8)
        self._checksummer = Checksummer(layout.block_bytes)

    def equal(self, blocks: IntArray, checksums: IntArray) -> Mask:
        """Return per block whether its bytes have the checksum; 0, not recorded, never matches."""
        found = np.empty(len(blocks), dtype=np.int64)
        for start in range(0, len(blocks), _VERIFY_SLOTS):
            part = blocks[start : start + _VERIFY_SLOTS]
            places = np.arange(len(part), dtype=np.int64)
            try:
                self._device.gather(part, self._scratch, places)
            finally:
                self._device.fence()
            found[start : start + len(part)] = self._checksummer.of(self._scratch, places)
        equal: Mask = found == checksums
        return equal
