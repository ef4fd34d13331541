# SPDX-License-Identifier: Apache-2.0
"""Changes between the engine thread and the directory."""

from __future__ import annotations

import asyncio
import threading

from xinference_xavier.control.messages import MAX_KEYS, Publication, pack_keys, unpack_keys
from xinference_xavier.control.session import Outbox

BATCH_S = 0.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def started(limit: int = 10_000) -> Outbox:
    outbox = Outbox(limit)
    outbox.restart(asyncio.get_running_loop().call_soon_threadsafe)
    return outbox


def test_what_happens_before_somebody_collects_is_dropped() -> None:
    async def run() -> list[Publication]:
        outbox = Outbox()
        outbox.put([key(1)], [])
        outbox.put_clear()
        outbox.restart(asyncio.get_running_loop().call_soon_threadsafe)
        outbox.put([key(2)], [])
        return await outbox.take(BATCH_S)

    assert asyncio.run(run()) == [Publication(0, key(2))]


def test_a_batch_holds_the_last_word_on_each_block() -> None:
    async def run() -> list[Publication]:
        outbox = started()
        outbox.put([key(1), key(2)], [])
        outbox.put([key(3)], [key(1)])
        outbox.put([key(4)], [key(4)])
        outbox.put([], [key(3)])
        outbox.put([key(3)], [])
        return await outbox.take(BATCH_S)

    (batch,) = asyncio.run(run())
    assert set(unpack_keys(batch.added)) == {key(2), key(3), key(4)}
    assert batch.removed == key(1)


def test_a_clear_comes_alone_between_what_was_before_and_after() -> None:
    async def run() -> list[list[Publication]]:
        outbox = started()
        outbox.put([key(1)], [])
        outbox.put_clear()
        outbox.put([key(2)], [])
        return [await outbox.take(BATCH_S) for _ in range(2)]

    assert asyncio.run(run()) == [[Publication(0, clear=True)], [Publication(0, key(2))]]


def test_large_changes_are_cut_into_messages() -> None:
    many = [key(number) for number in range(MAX_KEYS + 10)]

    async def run() -> list[Publication]:
        outbox = started()
        outbox.put(many[10:], many[:10])
        outbox.put(many[5:10], [])
        first = await outbox.take(BATCH_S)
        return first + await outbox.take(BATCH_S)

    publications = asyncio.run(run())
    assert all(len(p.added) + len(p.removed) <= 32 * MAX_KEYS for p in publications)
    held: set[bytes] = set(many[:10])
    for publication in publications:
        held |= set(unpack_keys(publication.added))
        held -= set(unpack_keys(publication.removed))
    assert held == set(many[5:])


def test_too_much_is_dropped_and_asks_for_a_snapshot() -> None:
    async def run() -> None:
        outbox = started(limit=10)
        outbox.put([key(number) for number in range(8)], [])
        assert not outbox.overflowed
        outbox.put([key(number) for number in range(8, 12)], [])
        assert outbox.overflowed
        assert await outbox.take(BATCH_S) == [
            Publication(0, pack_keys(key(number) for number in range(8)))
        ]
        outbox.restart(asyncio.get_running_loop().call_soon_threadsafe)
        assert not outbox.overflowed
        outbox.put([key(1)], [])
        assert await outbox.take(BATCH_S) == [Publication(0, key(1))]

    asyncio.run(run())


def test_overflow_alone_wakes_the_reader() -> None:
    async def run() -> list[Publication]:
        outbox = started(limit=1)
        taking = asyncio.create_task(outbox.take(BATCH_S))
        await asyncio.sleep(0)
        outbox.put([key(1), key(2)], [])
        return await taking

    assert asyncio.run(run()) == []


def test_nothing_is_lost_between_two_threads() -> None:
    total = 3000

    async def run() -> set[bytes]:
        outbox = started()
        seen: set[bytes] = set()

        def produce() -> None:
            for number in range(total):
                outbox.put([key(number)], [])

        producer = threading.Thread(target=produce)
        producer.start()
        while len(seen) < total:
            for publication in await outbox.take(BATCH_S):
                seen.update(unpack_keys(publication.added))
        producer.join()
        return seen

    assert len(asyncio.run(run())) == total
