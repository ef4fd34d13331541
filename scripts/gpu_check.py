# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need a GPU and a short benchmark, and prints one table.

Needs PyTorch 2.11 or later with CUDA (which brings Triton and cuda-bindings), numpy, pytest and a
C compiler for Triton; neither vLLM nor Xinference. Takes less than five minutes and up to 6 GiB
of one GPU's memory.

Exit status: 0 when every test passed, 1 when one failed or a measurement ended in an error, 2
without a GPU, 3 when a package is missing or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from tests.gpu.platforms import Platform
    from tests.gpu.replica import Replica

ROOT: Final = Path(__file__).resolve().parent.parent

OK, FAILED, NO_GPU, UNUSABLE = 0, 1, 2, 3

NEEDED: Final = ("torch", "triton", "cuda.bindings", "numpy", "pytest")

TESTS_LIMIT_S: Final = 200
"""The tests are stopped then; the measurements take less than a minute."""


@dataclass(frozen=True)
class Sizes:
    """What is measured: the blocks of the reference run, 24 layers of 2 heads of 64 in bfloat16.

    ``batch`` blocks are a prompt of 4400 tokens; ``histories`` are in blocks.
    """

    blocks: int = 1365
    layers: int = 24
    dim: int = 64
    batch: int = 275
    repeats: int = 30
    histories: tuple[int, ...] = (1_000, 10_000, 100_000)
    admitted: int = 128
    rounds: int = 10


@dataclass(frozen=True)
class Row:
    """One line of the table: ``seconds`` for ``nbytes``, and those of its floor, if it has one."""

    name: str
    nbytes: int
    seconds: float
    floor: str | None = None
    floor_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the line with its derived figures."""
        return {
            "name": self.name,
            "mib": self.nbytes / 2**20,
            "ms": self.seconds * 1e3,
            "gb_per_s": self.nbytes / self.seconds / 1e9,
            "of": self.floor,
            "share": None if self.floor_seconds is None else self.floor_seconds / self.seconds,
        }


class Measurements:
    """All figures of one replica on one device, and of a peer in another process."""

    def __init__(self, replica: Replica, sizes: Sizes) -> None:
        import numpy as np

        self._replica = replica
        self._sizes = sizes
        self._random = np.random.default_rng(0)
        self._nbytes = sizes.batch * replica.layout.slot_bytes
        self._floors: dict[str, float] = {}
        self._rows: list[Row] = []

    def copies(self) -> list[Row]:
        """Measure the device's copies, each beside one plain copy of as many bytes."""
        import numpy as np

        from xinference_xavier.store.jobs import Tier
        from xinference_xavier.store.pinning import page_aligned

        device, n = self._replica.memory.device, self._sizes.batch
        gpu = self._replica.memory.arenas[Tier.DEVICE].data
        host = self._replica.memory.arenas[Tier.HOST].data
        unpinned = page_aligned(self._nbytes).view(n, -1)
        first = np.arange(n, dtype=np.int64)
        blocks, slots, others = (self._scattered() for _ in range(3))
        timed: list[tuple[str, str | None, Callable[[], None]]] = [
            ("one device-to-device copy", None, lambda: device.move(gpu, first, gpu, first + n)),
            ("one device-to-host copy", None, lambda: device.move(gpu, first, host, first)),
            ("one host-to-device copy", None, lambda: device.move(host, first, gpu, first)),
            (
                "gather to the device tier",
                "one device-to-device copy",
                lambda: device.gather(blocks, gpu, slots),
            ),
            (
                "scatter from the device tier",
                "one device-to-device copy",
                lambda: device.scatter(gpu, slots, blocks),
            ),
            (
                "gather to the host tier",
                "one device-to-host copy",
                lambda: device.gather(blocks, host, slots),
            ),
            (
                "scatter from the host tier",
                "one host-to-device copy",
                lambda: device.scatter(host, slots, blocks),
            ),
            (
                "demotion of scattered slots",
                "one device-to-host copy",
                lambda: device.move(gpu, slots, host, others),
            ),
            (
                "gather to unpinned memory",
                "one device-to-host copy",
                lambda: device.gather(blocks, unpinned, first),
            ),
            (
                "scatter from unpinned memory",
                "one host-to-device copy",
                lambda: device.scatter(unpinned, first, blocks),
            ),
        ]

        def fenced(copy: Callable[[], None]) -> float:
            started = time.perf_counter()
            copy()
            device.fence()
            return time.perf_counter() - started

        return [
            self._time(name, floor, functools.partial(fenced, copy)) for name, floor, copy in timed
        ]

    def loads(self, kind: str, make: Callable[[], Any]) -> list[Row]:
        """Measure whole loads: from the own tiers, and from a peer's by CUDA IPC and mapping."""
        from tests.gpu.replica import D, H, peer_process

        n = self._sizes.batch
        self._replica.store([(b, tier, b, 100 + b, -1) for tier in (D, H) for b in range(n)])
        floors = {D: "one device-to-device copy", H: "one host-to-device copy"}
        names = {D: "device", H: "host"}
        wanted = {tier: [(tier, b, 100 + b, n - 1 - b) for b in range(n)] for tier in (D, H)}
        rows = [
            self._time(
                f"load from the own {names[tier]} tier",
                floors[tier],
                functools.partial(self._load_seconds, wanted[tier]),
            )
            for tier in (D, H)
        ]
        blocks = self._sizes.blocks
        with peer_process(kind, make=make, blocks=blocks) as (handle, packed, _):
            for tier in (D, H):
                path, _ = self._replica.load(wanted[tier], handle)
                rows.append(
                    self._time(
                        f"load from a peer's {names[tier]} tier ({path})",
                        floors[tier],
                        functools.partial(self._load_seconds, wanted[tier], handle),
                    )
                )
            if self._replica.blocks()[:n] != packed[:n][::-1]:
                raise RuntimeError("the loaded blocks are not those of the peer")
        return rows

    def admissions(self) -> list[dict[str, Any]]:
        """Measure what admitting one block with a demotion costs, by blocks held before."""
        return [self._admission(history) for history in self._sizes.histories]

    def _admission(self, history: int) -> dict[str, Any]:
        from xinference_xavier.store.index import SnapshotIndex
        from xinference_xavier.store.jobs import Tier

        n = self._sizes.admitted
        slots = {int(tier): arena.slots for tier, arena in self._replica.memory.arenas.items()}
        device = max(4 * n, history // 20)
        host = max(4 * n, history - device)
        index = SnapshotIndex(device_slots=device, host_slots=host + n, spare_slots=n)
        keys = _keys()
        ids = self._random.permutation(self._sizes.blocks)[:n].tolist()

        def batch() -> list[tuple[bytes, int]]:
            return [(next(keys), block) for block in ids]

        for _ in range((device + host) // n + 1):
            index.commit(index.admit(batch()).job_id)
        bookkeeping, copies = [], []
        for _ in range(self._sizes.rounds):
            new = batch()
            started = time.perf_counter()
            plan = index.admit(new)
            planned = time.perf_counter()
            # The index has more slots than any GPU: several share one of the arena's.
            demotions = [
                (a % slots[Tier.DEVICE], b % slots[Tier.HOST], g) for a, b, g in plan.demotions
            ]
            stores = [(b, t, s % slots[int(t)], g, after) for b, t, s, g, after in plan.stores]
            copies.append(self._replica.store(stores, demotions))
            ended = time.perf_counter()
            index.commit(plan.job_id)
            bookkeeping.append(planned - started + time.perf_counter() - ended)
        return {
            "history": history,
            "us_per_block": (median(bookkeeping) + median(copies)) / n * 1e6,
            "bookkeeping_us": median(bookkeeping) / n * 1e6,
            "copies_us": median(copies) / n * 1e6,
        }

    def _scattered(self) -> Any:
        return self._random.permutation(self._sizes.blocks)[: self._sizes.batch]

    def _load_seconds(self, *load: Any) -> float:
        # Its own clock: the caller only looks every half a millisecond whether it is done.
        _, seconds = self._replica.load(*load)
        return seconds

    def _time(self, name: str, floor: str | None, work: Callable[[], float]) -> Row:
        seconds = [work() for _ in range(self._sizes.repeats + 2)]
        # The first ones compile, allocate, and touch memory for the first time.
        middle = self._floors[name] = median(seconds[2:])
        return Row(name, self._nbytes, middle, floor, self._floors[floor] if floor else None)


def measure(on: Platform, kind: str, sizes: Sizes) -> dict[str, Any]:
    """Return all figures of a device; ``kind`` is the platform that a peer process makes."""
    from tests.gpu.replica import Replica, plain_kv

    make = functools.partial(plain_kv, sizes.blocks, sizes.layers, sizes.dim)
    replica = Replica(on, make, blocks=sizes.blocks, verify="off")
    try:
        replica.randomize(1)
        measured = Measurements(replica, sizes)
        rows = [*measured.copies(), *measured.loads(kind, make)]
        return {
            "rows": [row.to_dict() for row in rows],
            "admission": measured.admissions(),
            "block_bytes": replica.layout.block_bytes,
            "host_tier_unpinned_because": replica.memory.unpinned,
        }
    finally:
        replica.close()


def run_tests() -> dict[str, Any]:
    """Run tests/gpu on the GPU; ``ok`` tells whether all passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-k", "not fake"]
        # The project's own settings need plugins that are not wanted here.
        command += ["-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
        tests = ROOT / "tests" / "gpu"
        command += [f"--junitxml={report}", f"--ignore={tests / 'test_gpu_check.py'}", str(tests)]
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=TESTS_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"ok": False, "reason": f"not done after {TESTS_LIMIT_S} s"}
        if not report.exists():
            return {"ok": False, "reason": f"pytest ended with {ended.returncode}"}
        (suite,) = xml.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    return {"ok": ended.returncode == 0 and passed > 0, "passed": passed, **counts}


def missing() -> list[str]:
    """Return the packages that have to be installed first."""

    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in NEEDED if not found(name)]


def machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": properties.total_memory / 2**30,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def table(report: dict[str, Any]) -> str:
    """Return everything as one table of text."""
    lines = [("", "MiB", "ms", "GB/s", "share", "of")]
    for row in report["rows"]:
        share = "" if row["share"] is None else f"{row['share']:.2f}"
        numbers = (f"{row['mib']:.1f}", f"{row['ms']:.3f}", f"{row['gb_per_s']:.1f}")
        lines.append((row["name"], *numbers, share, row["of"] or ""))
    for cell in report["admission"]:
        name = f"admission, {cell['history']} blocks held, us per block"
        books = f"{cell['bookkeeping_us']:.1f} bookkeeping, {cell['copies_us']:.1f} copies"
        lines.append((name, "", f"{cell['us_per_block']:.1f}", "", "", books))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    head = "  ".join(f"{key}={value}" for key, value in report["machine"].items())
    tests = "  ".join(f"{key}={value}" for key, value in report["tests"].items())
    body = [
        "  ".join(
            cell.ljust(width) if column in (0, 5) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([head, f"tests: {tests}", "", *body])


def main(arguments: list[str] | None = None) -> int:
    """Run everything; return the exit status."""
    parser = _Parser(
        prog="gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    absent = missing()
    if "torch" not in absent and not _has_gpu():
        print("no CUDA device is available to PyTorch: nothing to check", file=sys.stderr)
        return NO_GPU
    if absent:
        print(f"not installed: {', '.join(absent)}; see docs/gpu.md", file=sys.stderr)
        return UNUSABLE
    from tests.gpu.platforms import OnCuda

    started = time.monotonic()
    report: dict[str, Any] = {"machine": machine(), "tests": run_tests()}
    report |= measure(OnCuda(), "cuda", Sizes())
    report["seconds"] = time.monotonic() - started
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return OK if report["tests"]["ok"] else FAILED


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(UNUSABLE, f"{self.prog}: {message}\n")


def _keys() -> Iterator[bytes]:
    for number in itertools.count():
        yield hashlib.sha256(number.to_bytes(8, "little")).digest()


if __name__ == "__main__":
    sys.exit(main())
