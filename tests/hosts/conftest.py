# SPDX-License-Identifier: Apache-2.0
"""Three hosts on a hub: the directory, or Xinference's supervisor, on the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.hosts.host import Host, require_hosts
from tests.hosts.hub import Hub


@dataclass(frozen=True)
class Network:
    """The hosts and what connects them. Replicas run on ``source`` and ``reader``."""

    head: Host
    source: Host
    reader: Host
    hub: Hub

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.head, self.source, self.reader


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    require_hosts()
    folder = tmp_path_factory.mktemp("hosts")
    with contextlib.ExitStack() as made:
        hosts = [made.enter_context(contextlib.closing(Host(n, folder))) for n in (1, 2, 3)]
        hub = made.enter_context(contextlib.closing(Hub(hosts)))
        yield Network(*hosts, hub)
