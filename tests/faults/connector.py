# SPDX-License-Identifier: Apache-2.0
"""The connector of the engines under test: ours, with faults at its boundaries.

vLLM imports this module in each of an engine's processes.
"""

from __future__ import annotations

from tests.faults.boundaries import install_engine
from xinference_xavier.vllm import connector

install_engine()


class XavierConnector(connector.XavierConnector):
    """The product's connector; what it calls was wrapped above."""
