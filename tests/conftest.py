# SPDX-License-Identifier: Apache-2.0
"""How pytest-xdist shares out the tests: a file stays together, and all engines in one process.

Real engines take the host's cores and memory, so no two tests with engines run at a time; the
tests without any run beside them.
"""

from __future__ import annotations

import pytest


# First, since pytest-xdist's looks for the marks. Those of folders, which set marks as well, are
# called before it: of several first ones, the last that is registered comes first.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The engines are given out first: they take the longest.
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    for item in items:
        engines = item.get_closest_marker("e2e") is not None
        name = "engines" if engines else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(name))
