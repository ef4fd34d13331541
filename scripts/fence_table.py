# SPDX-License-Identifier: Apache-2.0
"""The statements that keep copies in order, and the tests that must miss each of them.

Used by ``fence_mutations.py``. Files are named below the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Mutation:
    """``old`` occurs once in ``file`` and becomes ``new``; one of ``tests`` must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


CUDA_FENCES: Final = "tests/store/test_fences_cuda.py"
CUDA_DEVICE: Final = "tests/store/test_cuda_device.py"
CUDA_ARENA: Final = "tests/store/test_cuda_arena.py"
ORDER: Final = ("tests/store/test_fences.py",)
COPIER: Final = ("tests/store/test_copier.py",)
LOADER: Final = ("tests/store/test_loader.py",)
WORKER: Final = ("tests/vllm/test_worker.py",)
WORKER_CUDA: Final = ("tests/vllm/test_worker_cuda.py",)


def fence(name: str, file: str, copy: str, wait: str, tests: tuple[str, ...]) -> list[Mutation]:
    """Return what can be taken from ``try: copy; finally: wait``.

    ``copy`` and ``wait`` are the two lines. Without the second the copy is waited for never;
    without the ``finally``, not where it fails, which is when others take its memory.
    """
    indent = " " * (len(copy) - len(copy.lstrip()) - 4)
    # A comment may stand above the wait.
    *comments, statement = wait.splitlines(keepends=True)
    ends = f"{copy}{indent}finally:\n{''.join(comments)}"
    blank = statement[: len(statement) - len(statement.lstrip())]
    otherwise = f"{copy}{indent}except ZeroDivisionError:\n{indent}    pass\n{indent}else:\n"
    return [
        Mutation(f"{name}: no fence", file, f"{ends}{statement}", f"{ends}{blank}pass\n", tests),
        Mutation(f"{name}: no fence where it fails", file, f"{ends}{statement}",
                 f"{otherwise}{statement}", tests),
    ]  # fmt: skip


def gone(name: str, file: str, statement: str, tests: tuple[str, ...]) -> Mutation:
    """Return the removal of whole lines."""
    return Mutation(name, file, statement, "", tests)


def swapped(name: str, file: str, first: str, second: str, tests: tuple[str, ...]) -> Mutation:
    """Return the exchange of two neighbouring pieces."""
    return Mutation(name, file, first + second, second + first, tests)


_COPIER = "store/copier.py"
_MOVE = "                self._device.move(source.data, from_slots, target.data, slots)\n"
_GATHER = "                self._device.gather(blocks, arena.data, slots)\n"
_WAIT = "                self._device.fence()\n"
_PUBLISH_MOVE = "            publish(target.meta, slots[good], rows[good, 2], checksums[good])\n"
_PUBLISH_GATHER = "            publish(arena.meta, slots[good], rows[good, 3], checksums[good])\n"

_PUBLISH_WHOLE_MOVE = (
    "publish(target.meta, slots, rows[:, 2], source.meta.numpy()[from_slots, 1])\n"
)
_PUBLISH_WHOLE_STORE = "publish(arena.meta, slots, rows[:, 3], np.zeros(len(slots), np.int64))\n"

_STORES: Final = (
    gone(
        "a store does not wait for its forward",
        _COPIER,
        "                    self._device.after(after)\n",
        ORDER,
    ),
    Mutation(
        "the copy engine loses the mark",
        _COPIER,
        "self._jobs.put((job, after))",
        "self._jobs.put((job, None))",
        ORDER,
    ),
    swapped(
        "a job stores before it demotes",
        _COPIER,
        "        self._demote(job.demotions, result)\n",
        "        self._store(job.stores, len(job.demotions), result)\n",
        COPIER,
    ),
    gone(
        "a demotion's target is not withdrawn",
        _COPIER,
        "        withdraw(target.meta, slots)\n",
        COPIER,
    ),
    *fence("a demotion", _COPIER, _MOVE, _WAIT, ORDER),
    Mutation(
        "a demotion is published before its fence",
        _COPIER,
        _MOVE,
        f"{_MOVE}                {_PUBLISH_WHOLE_MOVE}",
        COPIER,
    ),
    gone("a demotion is not published", _COPIER, _PUBLISH_MOVE, COPIER),
    gone(
        "a store's slot is not withdrawn", _COPIER, "        withdraw(arena.meta, slots)\n", COPIER
    ),
    *fence("a store", _COPIER, _GATHER, _WAIT, ORDER),
    Mutation(
        "a store is published before its fence",
        _COPIER,
        _GATHER,
        f"{_GATHER}                {_PUBLISH_WHOLE_STORE}",
        COPIER,
    ),
    gone("a store is not published", _COPIER, _PUBLISH_GATHER, COPIER),
    Mutation(
        "withdrawing does nothing",
        _COPIER,
        "    meta.numpy()[slots, 0] = 0\n",
        "    pass\n",
        COPIER,
    ),
    swapped(
        "the generation is published before the checksum",
        _COPIER,
        "    array[slots, 1] = checksums\n",
        "    array[slots, 0] = generations\n",
        ORDER,
    ),
    *fence(
        "a checksum of slots on a GPU",
        "store/checksum.py",
        "                device.move(data, part, self._read, places)\n",
        "                device.fence()\n",
        ("tests/store/test_checksum.py", CUDA_FENCES),
    ),
)

_SEGMENT = "transport/segment.py"
_COPY = "        self._scatter(view.data, slots[good], blocks[good])\n"

_LOADS: Final = (
    Mutation(
        "the load engine loses the mark",
        "transport/loader.py",
        "_Task(job, peers, after, time.monotonic())",
        "_Task(job, peers, None, time.monotonic())",
        ORDER,
    ),
    Mutation(
        "a segment does not get the mark",
        "transport/loader.py",
        "after=task.after,",
        "after=None,",
        ORDER,
    ),
    gone(
        "a load does not wait for the forwards in flight",
        _SEGMENT,
        "            self._means.device.after(self._after)\n",
        ORDER,
    ),
    *fence(
        "a load",
        _SEGMENT,
        "                self._means.device.scatter(data, slots, blocks)\n",
        "                self._means.device.fence()\n",
        ORDER,
    ),
    swapped(
        "generations are compared again before the copy is complete",
        _SEGMENT,
        _COPY,
        "        good &= _holds(meta[slots, 0], promised)\n",
        LOADER,
    ),
    Mutation(
        "generations are compared after the copy only",
        _SEGMENT,
        "        good = _holds(meta[slots, 0], promised)\n        checksums",
        "        good = np.ones(len(slots), dtype=np.bool_)\n        checksums",
        LOADER,
    ),
    Mutation(
        "the generations that came with fetched slots are not compared",
        _SEGMENT,
        "                holds = _holds(table[:, 0], promised)\n",
        "                holds = np.ones(len(part), dtype=np.bool_)\n",
        LOADER,
    ),
    *fence(
        "verification",
        "store/checksum.py",
        "                self._device.gather(part, self._scratch, places)\n",
        _WAIT,
        ORDER,
    ),
    gone(
        "a promotion's target is not withdrawn",
        "transport/promotion.py",
        "    withdraw(arena.meta, slots)\n",
        ORDER,
    ),
    *fence(
        "a promotion",
        "transport/promotion.py",
        "        means.device.gather(block_ids, arena.data, slots)\n",
        "        means.device.fence()\n",
        ORDER,
    ),
    Mutation(
        "a promotion is published before its fence",
        "transport/promotion.py",
        "        means.device.gather(block_ids, arena.data, slots)\n",
        "        means.device.gather(block_ids, arena.data, slots)\n"
        "        publish(arena.meta, slots, generations, host.meta.numpy()[sources, 1])\n",
        ORDER,
    ),
    gone(
        "a promotion is not published",
        "transport/promotion.py",
        "    publish(arena.meta, slots, generations, host.meta.numpy()[sources, 1])\n",
        ORDER,
    ),
    *fence(
        "slots of a GPU for a socket",
        "transport/xoscar.py",
        "            self._device.move(data, slots, rows, np.arange(len(slots), dtype=np.int64))\n",
        "            self._device.fence()\n",
        (CUDA_FENCES,),
    ),
    Mutation(
        "a connection closes under a running copy",
        "transport/links.py",
        "if not link.retired or link.users or link.paths is None:",
        "if not link.retired or link.paths is None:",
        ("tests/transport/test_links.py",),
    ),
)

_MARK_LOADS = "            after = self._mark()\n        except"
_MARK_STORES = "            after = self._mark() if left else None\n"

_WORKER: Final = (
    Mutation(
        "a step's loads take no mark",
        "vllm/worker.py",
        _MARK_LOADS,
        _MARK_LOADS.replace("self._mark()", "None"),
        WORKER,
    ),
    Mutation(
        "a step's stores take no mark",
        "vllm/worker.py",
        _MARK_STORES,
        _MARK_STORES.replace("self._mark() if left else None", "None"),
        WORKER,
    ),
    Mutation(
        "the worker's marks are none",
        "vllm/worker.py",
        "return None if self._memory is None else self._memory.device.mark()",
        "return None",
        WORKER,
    ),
    Mutation(
        "the worker submits stores without their mark",
        "vllm/worker.py",
        "self._copies.submit(left[0], after)",
        "self._copies.submit(left[0])",
        WORKER,
    ),
    Mutation(
        "the worker submits loads without their mark",
        "vllm/worker.py",
        "self._loads.submit(job, handles, after)",
        "self._loads.submit(job, handles)",
        WORKER,
    ),
    Mutation(
        "memory goes while a copy is running",
        "vllm/worker.py",
        "        unused = not running\n",
        "        unused = True\n",
        WORKER,
    ),
    Mutation(
        "memory goes while a transfer may write it",
        "vllm/worker.py",
        "unused &= self._transports.close(end - time.monotonic())",
        "self._transports.close(end - time.monotonic())",
        WORKER,
    ),
    gone(
        "the device is not closed before memory goes",
        "vllm/memory.py",
        "            made.callback(self.device.close)\n",
        WORKER,
    ),
    gone(
        "the host tier is not unpinned before it goes",
        "vllm/memory.py",
        "                    made.callback(pinning.close)\n",
        WORKER_CUDA,
    ),
    gone(
        "an arena is not withdrawn when it closes",
        "store/arena.py",
        "        self.meta[:, 0] = 0\n",
        ("tests/store/test_arena.py",),
    ),
)

_DEVICE = "store/cuda_device.py"

_CUDA: Final = (
    Mutation(
        "room for indices is used again at once",
        _DEVICE,
        "        if self._used + count > len(self._indices):\n            self.fence()\n",
        "        if self._used + count > len(self._indices):\n            self._used = 0\n",
        (CUDA_DEVICE,),
    ),
    gone(
        "a fence records nothing",
        _DEVICE,
        "        self._api.event_record(self._event, self.stream)\n",
        (CUDA_DEVICE,),
    ),
    gone(
        "a fence does not wait",
        _DEVICE,
        "        self._api.event_synchronize(self._event)\n",
        (CUDA_DEVICE,),
    ),
    gone(
        "closing does not wait for what a lost fence left",
        _DEVICE,
        "            undo.callback(self.fence)\n",
        (CUDA_FENCES,),
    ),
    Mutation(
        "a mark records nothing",
        _DEVICE,
        "            self._api.event_record(event, self._api.compute_stream())\n",
        "            pass\n",
        (CUDA_DEVICE,),
    ),
    Mutation(
        "a stream does not wait for a mark",
        _DEVICE,
        "            self._api.stream_wait(self._lane().stream, mark.event)\n",
        "            pass\n",
        (CUDA_DEVICE,),
    ),
    Mutation(
        "the device's fence does nothing",
        _DEVICE,
        "            lane.fence()\n",
        "            pass\n",
        (CUDA_DEVICE,),
    ),
    *fence(
        "a copy through the scratch area",
        _DEVICE,
        "                    copy(part, np.arange(part.stop - start, dtype=np.int64))\n",
        "                    # Another thread's copies may use the area next.\n"
        "                    self.fence()\n",
        (CUDA_FENCES,),
    ),
    gone(
        "the first copy does not wait for forwards",
        _DEVICE,
        "        self.after(self.mark())\n",
        (CUDA_FENCES,),
    ),
    gone(
        "the first copy is not waited for",
        _DEVICE,
        "        self.scatter(self._scratch, first, first)\n        self.fence()\n",
        (CUDA_FENCES,),
    ),
    gone(
        "an arena's nonce is copied without an event",
        "store/device_arena.py",
        "        api.event_record(event, stream)\n",
        (CUDA_ARENA,),
    ),
    gone(
        "an arena's nonce is not waited for",
        "store/device_arena.py",
        "        api.event_synchronize(event)\n",
        (CUDA_ARENA,),
    ),
    Mutation(
        "a GPU's memory is freed while a peer maps it",
        "store/device_arena.py",
        "            if not _locked_alone(fd, time.monotonic() + deadline_s):\n",
        "            if False:\n",
        (CUDA_ARENA,),
    ),
)

EXEMPT: Final = {
    "doctor/paths.py": "fills an arena of its own, on the host, before anybody can map it",
}
"""Files whose statements order nothing, and why."""

MUTATIONS: Final[tuple[Mutation, ...]] = (*_STORES, *_LOADS, *_WORKER, *_CUDA)
