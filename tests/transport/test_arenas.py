# SPDX-License-Identifier: Apache-2.0
"""Which arenas are a process's own, for tests that look for a dead one's memory."""

from __future__ import annotations

import os
from contextlib import closing

from store_peer import Peer

from tests.arenas import own_arenas
from xinference_xavier.demo.leftovers import ARENA, files_of
from xinference_xavier.store.arena import Arena
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.shm import ShmTransport


def test_the_arena_of_a_peer_is_not_our_own_while_it_is_mapped() -> None:
    peer = Peer()
    with closing(peer), closing(Arena.create(1, 64, "ours")) as arena:
        theirs = own_arenas(peer.process.pid)
        with closing(ShmTransport().connect(peer.handle, Tier.HOST)):
            assert theirs & files_of([os.getpid()], ARENA)
            ours = own_arenas(os.getpid())
        assert arena.handle().inode in {file.inode for file in ours}
        assert theirs
        assert not ours & theirs
