# SPDX-License-Identifier: Apache-2.0
"""Whatever a worker's slot server is asked to push: slots of the tier, or an exception for who
asked. Nothing is listed or copied for a request that names what is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import xoscar as xo
from hypothesis import given

from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import mutated
from xinference_xavier.store.jobs import Tier
from xinference_xavier.transport.base import SlotView
from xinference_xavier.transport.xoscar import MOST_SLOTS, SlotServer

SLOTS, SLOT_BYTES = 8, 64
NONCE = b"n" * 16
PUSH = (int(Tier.HOST), NONCE, [(0, 2), (5, 1)], ["first", "second"])


class Server:
    """A slot server over host memory; what it copies is counted instead of sent."""

    def __init__(self) -> None:
        data = torch.arange(SLOTS * SLOT_BYTES, dtype=torch.int64).to(torch.uint8)
        meta = torch.arange(SLOTS * 2, dtype=torch.int64).view(SLOTS, 2)
        view = SlotView(data.view(SLOTS, SLOT_BYTES), meta)
        self.actor = SlotServer({Tier.HOST: view}, {Tier.HOST: NONCE}, SLOT_BYTES, None)
        self.meta = meta
        self.sent = 0

    async def copy_to(self, buffers: list[Any], refs: list[Any]) -> None:
        assert len(buffers) == len(refs)
        self.sent += sum(buffer.nbytes for buffer in buffers)

    def push(self, arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xo, "copy_to", self.copy_to)
            try:
                return asyncio.run(self.actor.push(*arguments))
            except Exception as error:  # it travels to who asked
                return error


def test_the_unchanged_request_is_obeyed() -> None:
    server = Server()
    assert server.push(PUSH).tolist() == server.meta[[0, 1, 5]].tolist()
    assert server.sent == 3 * SLOT_BYTES


@in_both_lanes(few=150, many=20_000)
@given(arguments=mutated(PUSH))
def test_a_changed_request_gets_slots_of_the_tier_or_nothing(arguments: Any) -> None:
    server = Server()
    answer = server.push(arguments if isinstance(arguments, tuple) else ())
    if isinstance(answer, Exception):
        assert server.sent == 0
    else:
        assert {tuple(row) for row in answer.tolist()} <= {tuple(r) for r in server.meta.tolist()}
        assert server.sent == len(answer) * SLOT_BYTES
    assert server.push(PUSH).tolist() == server.meta[[0, 1, 5]].tolist()


@pytest.mark.parametrize(
    "runs", [[], [(0, 10**12)], [(-1, 2)], [(7, 2)], [(3, 0)], [(0, SLOTS)] * MOST_SLOTS]
)
def test_runs_that_are_not_there_are_refused_before_they_are_listed(runs: Any) -> None:
    server = Server()
    answer = server.push((int(Tier.HOST), NONCE, runs, ["ref"] * len(runs)))
    assert isinstance(answer, ValueError)
    assert server.sent == 0
