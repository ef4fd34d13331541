# SPDX-License-Identifier: Apache-2.0
"""The two things that the tests here run on: a GPU, and the fake CUDA where there is none.

On the fake they show that the tests themselves are right; what only a GPU can show is marked
:data:`needs_gpu`. Nothing here needs vLLM or Xinference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
import torch

from tests.store import fake_cuda
from tests.store.kvcache import KvCaches
from xinference_xavier.store.cuda import Cuda, CudaApi

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second CUDA device")

BUSY_CYCLES = 1_000_000_000
"""A kernel that runs for about half a second: nothing queued behind it has run meanwhile."""


class Platform(Protocol):
    """A device to test on, in one process."""

    api: Any

    def kv(self, make: Callable[[], KvCaches]) -> KvCaches:
        """Make a KV cache in the device's memory, with the shapes and strides that ``make`` has."""

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a tensor of any memory, as they are now."""

    def fill(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Write host bytes into a tensor of any memory, now."""

    def forward(self, tensor: torch.Tensor, value: int) -> None:
        """Queue a slow kernel, then one that writes, on the compute stream."""

    def close(self) -> None:
        """Check that everything was given back."""


class OnFake:
    """Host memory posing as a GPU's."""

    def __init__(self, index: int = 0) -> None:
        self.api = fake_cuda.FakeCuda()

    def kv(self, make: Callable[[], KvCaches]) -> KvCaches:
        return {name: fake_cuda.on_device(tensor) for name, tensor in make().items()}

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return fake_cuda.host(tensor).clone()

    def fill(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        fake_cuda.host(tensor).copy_(source)

    def forward(self, tensor: torch.Tensor, value: int) -> None:
        self.api.compute(lambda: fake_cuda.host(tensor).fill_(value))

    def close(self) -> None:
        self.api.check_balanced()


class OnCuda:
    """A GPU."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)
        self.api: CudaApi = Cuda(self._device)

    def kv(self, make: Callable[[], KvCaches]) -> KvCaches:
        with self._device:
            return make()

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    def fill(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        tensor.copy_(source)
        torch.cuda.synchronize(self._device)

    def forward(self, tensor: torch.Tensor, value: int) -> None:
        torch.cuda._sleep(BUSY_CYCLES)
        tensor.fill_(value)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)


PLATFORMS: dict[str, type[OnFake] | type[OnCuda]] = {"fake": OnFake, "cuda": OnCuda}
