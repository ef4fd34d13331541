# SPDX-License-Identifier: Apache-2.0
"""How options become arguments of vLLM's engine. Pure."""

from __future__ import annotations

from typing import Any

from xinference_xavier.features import HASH_ALGORITHM
from xinference_xavier.options import Deployment, XavierOptions


def engine_arguments(options: XavierOptions, deployment: Deployment) -> dict[str, Any]:
    """Return what ``AsyncEngineArgs`` must get, whatever the user's other arguments are."""
    return {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": HASH_ALGORITHM,
        "kv_transfer_config": {
            "kv_connector": "XavierConnector",
            "kv_connector_module_path": "xinference_xavier.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**options.to_mapping(), **deployment.to_mapping()},
        },
    }
