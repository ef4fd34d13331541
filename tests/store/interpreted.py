# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, run by Triton's interpreter on the CPU.

Triton decides at decoration: a second copy of the module is made with the interpreter on, and
neither the product's module nor anything else in the process is touched.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType
from unittest import mock

from xinference_xavier.store import kernels


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interpreted_kernels", kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    named = mock.patch.dict("sys.modules", {spec.name: module})
    with named, mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        spec.loader.exec_module(module)
    return module


copy_spans = _load().copy_spans
