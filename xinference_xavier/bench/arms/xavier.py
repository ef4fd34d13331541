# SPDX-License-Identifier: Apache-2.0
"""Our own arm: plain vLLM servers with our connector, and a directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xinference_xavier.bench.arms.base import ArmSettings, Replicas
from xinference_xavier.bench.engines import (
    BLOCK_TOKENS,
    Engine,
    describe,
    running,
    running_directory,
    wait_until,
)
from xinference_xavier.bench.sharing import settle

PUBLISHED_S = 60.0


class XavierReplicas(Replicas):
    """Replicas that tell through their directory what they hold and what they are doing."""

    def __init__(self, engines: Sequence[Engine], directory: str) -> None:
        """``directory`` is its address."""
        super().__init__(engines)
        self._directory = directory

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return every member's status."""
        return describe(self._directory)

    def settle(self) -> None:
        """Wait until every copy into the stores has ended, too."""
        settle(self._directory, len(self.engines))
        super().settle()

    def share(self, prefixes: Sequence[str]) -> None:
        """See :class:`Replicas`; waits until all others have heard of all blocks."""
        readers = [engine.name for engine in self.engines[1:]]
        blocks = sum(len(prefix) // BLOCK_TOKENS for prefix in prefixes)
        before = self._known(readers)
        for prefix in prefixes:
            self.engines[0].complete(prefix, max_tokens=1)
        wait_until(
            lambda: all(
                now >= then + blocks for now, then in zip(self._known(readers), before, strict=True)
            ),
            f"{', '.join(readers)} know {blocks} more blocks",
            PUBLISHED_S,
        )
        self.settle()

    def _known(self, readers: Sequence[str]) -> list[int]:
        found = self.describe()
        return [int(found[name]["control"]["mirror_blocks"]) for name in readers]


class XavierArm:
    """What is to be measured."""

    name = "xavier"
    chunk_tokens = BLOCK_TOKENS
    hand_off = False
    note = None

    def check(self) -> None:
        """It is this package."""

    @contextmanager
    def start(self, settings: ArmSettings) -> Iterator[XavierReplicas]:
        """See :class:`~xinference_xavier.bench.arms.base.Arm`."""
        with running_directory(settings.folder / "directory.log") as directory:
            engines = [
                settings.engine(name, _options(settings, directory, name))
                for name in (f"xavier-{number}" for number in range(settings.replicas))
            ]
            with running(engines):
                yield XavierReplicas(engines, directory)


def _options(settings: ArmSettings, directory: str, member: str) -> dict[str, object]:
    return {
        "xavier_gpu_cache_bytes": settings.gpu_cache_bytes,
        "xavier_cpu_cache_bytes": settings.cpu_cache_bytes,
        "xavier_directory": directory,
        "xavier_member": member,
        **settings.xavier_options,
    }
