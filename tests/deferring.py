# SPDX-License-Identifier: Apache-2.0
"""A device that runs copies and forwards as late, as early or as mixed up as the rules allow.

Real devices mostly run work soon and in order, so that a missing fence shows once in a million
steps. :class:`Deferring` queues everything, one queue per thread (its stream) and one for the
engine's forwards, and runs it in the worst order that is still legal:

- work of one queue runs in the order in which it was given;
- a copy that was started after ``after(mark)`` runs after the forwards given before ``mark()``;
- a fence runs its own thread's queue, and what that has to run after; nobody else's;
- everything else is up to the chosen order.

A copy reads its source when it runs. Whoever looks at bytes, reuses a slot or gives up memory
without a fence, or lets a copy start without its mark, therefore gets wrong bytes every time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from xinference_xavier.store.device import Device, IntArray, Mark

ORDERS = ("late", "late copies", "late forwards", "mixed")
"""What is delayed until somebody must have it: everything, copies, forwards, or by chance."""


class Torn(RuntimeError):
    """A copy that failed after it had started a part of its work."""


KINDS = ("cpu", "late", "mixed")
"""What copies run on in tests that are not about order: at once, as on a CPU, or deferred."""


def placed(device: Device, kind: str, seed: int = 0) -> Device:
    """Return the device itself for the kind ``"cpu"``, else one that defers in that order."""
    return device if kind == "cpu" else Deferring(device, kind, seed)


@dataclass(frozen=True)
class _Point(Mark):
    """As many forwards must have run."""

    forwards: int


@dataclass(frozen=True)
class _Work:
    run: Callable[[], None]
    forwards: int = 0


@dataclass
class _Stream:
    work: deque[_Work] = field(default_factory=deque)
    lock: threading.RLock = field(default_factory=threading.RLock)
    forwards: int = 0
    errors: list[Exception] = field(default_factory=list)
    """What went wrong in work that another thread ran; the next fence raises it."""


class Deferring:
    """A :class:`Device` around one that copies at once. See the module."""

    def __init__(self, inner: Device, order: str = "late", seed: int = 0) -> None:
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is none of {ORDERS}")
        self.tear: str | None = None
        """The next copy of this kind starts its first row and raises."""
        self.closed = False
        self._inner = inner
        self.order = order
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._streams: list[_Stream] = []
        self._forwards = _Stream()
        self._given = self._run = 0
        self._engine: int | None = None

    # --- the engine's side ---------------------------------------------------------------------

    def forward(self, run: Callable[[], None]) -> None:
        """Give one forward to the compute stream."""
        self._engine = threading.get_ident()
        with self._lock:
            self._given += 1
            self._forwards.work.append(_Work(run))
        if self.order == "late copies":
            self.wait_forwards()
        self._stir()

    def wait_forwards(self, count: int | None = None) -> None:
        """Wait for the first ``count`` forwards, all by default, as a reader of tokens does."""
        self._run_forwards(self._given if count is None else count)

    @property
    def forwards(self) -> int:
        """Forwards given until now."""
        return self._given

    def mark(self) -> Mark:
        """See :class:`Device`."""
        self._check_open()
        self._engine = threading.get_ident()
        self._stir()
        return _Point(self._given)

    # --- copies --------------------------------------------------------------------------------

    def gather(self, block_ids: IntArray, data: torch.Tensor, slots: IntArray) -> None:
        """See :class:`Device`."""
        ids, places = block_ids.copy(), slots.copy()
        self._start("gather", lambda n: self._inner.gather(ids[:n], data, places[:n]))

    def scatter(self, data: torch.Tensor, slots: IntArray, block_ids: IntArray) -> None:
        """See :class:`Device`."""
        ids, places = block_ids.copy(), slots.copy()
        self._start("scatter", lambda n: self._inner.scatter(data, places[:n], ids[:n]))

    def move(
        self, source: torch.Tensor, source_slots: IntArray, target: torch.Tensor, slots: IntArray
    ) -> None:
        """See :class:`Device`."""
        origins, places = source_slots.copy(), slots.copy()
        self._start("move", lambda n: self._inner.move(source, origins[:n], target, places[:n]))

    def after(self, mark: Mark | None) -> None:
        """See :class:`Device`."""
        self._check_open()
        if mark is not None:
            if not isinstance(mark, _Point):
                raise TypeError(f"a foreign mark: {mark!r}")
            stream = self._mine()
            stream.forwards = max(stream.forwards, mark.forwards)

    def fence(self) -> None:
        """See :class:`Device`."""
        self._check_open()
        if threading.get_ident() == self._engine:
            raise AssertionError("the engine's thread waits for copies")
        stream = self._mine()
        self._stir()
        self._drain(stream)
        self._inner.fence()
        errors, stream.errors = stream.errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """See :class:`Device`."""
        if self.closed:
            return
        for stream in self._shuffled():
            self._drain(stream)
        self.closed = True
        self._inner.close()

    # --- looking -------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Copies started and not run."""
        return sum(len(stream.work) for stream in self._streams)

    def finish(self) -> None:
        """Run all that is left, forwards before copies unless those are to be late."""
        if self.order != "late forwards":
            self.wait_forwards()
        for stream in self._shuffled():
            self._drain(stream)
        self.wait_forwards()

    # --- the rules -----------------------------------------------------------------------------

    def _start(self, name: str, copy: Callable[[int | None], None]) -> None:
        self._check_open()
        stream = self._mine()
        torn, self.tear = self.tear == name, None if self.tear == name else self.tear
        rows = 1 if torn else None
        stream.work.append(_Work(lambda: copy(rows), stream.forwards))
        if self.order == "late forwards":
            self._drain(stream, willing=False)
        self._stir()
        if torn:
            raise Torn(f"a torn {name}")

    def _mine(self) -> _Stream:
        stream: _Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = _Stream()
            with self._lock:
                self._streams.append(stream)
        return stream

    def _drain(self, stream: _Stream, *, willing: bool = True, most: int = 1 << 30) -> None:
        """Run a thread's copies in order, with the forwards before them if ``willing``."""
        with stream.lock:
            while stream.work and most > 0:
                if stream.work[0].forwards > self._run and not willing:
                    return
                work = stream.work.popleft()
                self._run_forwards(work.forwards)
                most -= 1
                try:
                    work.run()
                except Exception as error:
                    stream.errors.append(error)

    def _run_forwards(self, count: int) -> None:
        with self._forwards.lock:
            while self._run < count:
                self._forwards.work.popleft().run()
                self._run += 1

    def _stir(self) -> None:
        """In the mixed order, let chance run a part of what may run now, whoever's it is."""
        if self.order != "mixed":
            return
        if self._forwards.lock.acquire(blocking=False):
            try:
                ready = self._given - self._run
                self._run_forwards(self._run + self._chance.randint(0, ready))
            finally:
                self._forwards.lock.release()
        for stream in self._shuffled():
            # Without waiting: its own thread may be inside one of its copies.
            if stream.lock.acquire(blocking=False):
                try:
                    most = self._chance.randint(0, len(stream.work))
                    self._drain(stream, willing=False, most=most)
                finally:
                    stream.lock.release()

    def _shuffled(self) -> list[_Stream]:
        with self._lock:
            streams = list(self._streams)
            self._chance.shuffle(streams)
        return streams

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the device is closed")
