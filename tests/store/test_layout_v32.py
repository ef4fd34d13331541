# SPDX-License-Identifier: Apache-2.0
"""The table of KV cache layouts says what the installed vLLM does: here its V32 rows."""

from __future__ import annotations

import backend_shapes
import pytest

layouts = pytest.importorskip(
    "vllm.v1.kv_cache_layout", reason="this vLLM lays out its cache in another way"
)


def test_the_table_has_the_layouts_of_the_installed_version() -> None:
    found = {layout.name: layout.stride_order for layout in layouts.KVCacheLayout}
    assert {name: shape.order for name, shape in backend_shapes.V32.items()} == found
