# SPDX-License-Identifier: Apache-2.0
"""Shared KV cache between vLLM replicas, GPU first."""

__version__ = "0.2.0"
