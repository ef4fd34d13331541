# SPDX-License-Identifier: Apache-2.0
"""A vLLM API server whose copies can be held, so that it is killed in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import psutil

from tests.crash.victim import title
from xinference_xavier.bench.engines import Engine, wait_ended, wait_until

FOLDER: Final = "XAVIER_CRASH_FOLDER"
"""Environment variable with the folder of the signs; see ``holding``."""

OPTIONS = {
    "xavier_gpu_first": True,
    "xavier_gpu_cache_bytes": "8MiB",
    "xavier_cpu_cache_bytes": "16MiB",
    "xavier_verify": "checksum",
    # A tiny model computes faster than anything can be loaded, and a busy machine answers late.
    "xavier_min_load_tokens": 0,
    "xavier_lookup_timeout": 5,
}

Part = Literal["server", "engine", "rank"]
"""The processes of a replica: the API server, vLLM's engine core, and the worker with the KV."""

TITLES = {"engine": "VLLM::EngineCor", "rank": "VLLM::Worker"}


class HeldEngine(Engine):
    """An engine whose copies can be held; it writes nothing but below ``folder``."""

    def __init__(self, name: str, model: Path, folder: Path, core: int, directory: str) -> None:
        self.folder = folder
        folder.mkdir()
        self._seen: list[psutil.Process] = []
        super().__init__(
            name,
            model,
            folder / "log",
            core,
            extra={**OPTIONS, "xavier_directory": directory, "xavier_member": name},
            environment={
                FOLDER: str(folder),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
        )

    def command(self) -> list[str]:
        ours, held = "xinference_xavier.vllm.connector", "tests.crash.holding"
        return [word.replace(ours, held) for word in super().command()]

    def part(self, part: Part) -> psutil.Process:
        """Return one of its processes."""
        assert self.process is not None
        if part == "server":
            return psutil.Process(self.process.pid)
        [found] = [p for p in self.processes() if title(p).startswith(TITLES[part])]
        return found

    def everything(self) -> list[psutil.Process]:
        """Return all of its processes."""
        self._seen = [self.part("server"), *self.processes()]
        return self._seen

    def stop(self, timeout: float = 30) -> None:
        """End it, and what a failed test left of it."""
        super().stop(timeout)
        for process in wait_ended(self._seen, 0):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @contextmanager
    def holding(self, what: Literal["load", "save"]) -> Iterator[None]:
        """Let the next load (or save) wait in its copy until the block ends."""
        (self.folder / f"hold-{what}").touch()
        try:
            yield
        finally:
            (self.folder / f"hold-{what}").unlink()
            (self.folder / f"held-{what}").unlink(missing_ok=True)

    def wait_held(self, what: Literal["load", "save"]) -> None:
        wait_until((self.folder / f"held-{what}").exists, f"{self.name} is in a {what}", 60)
