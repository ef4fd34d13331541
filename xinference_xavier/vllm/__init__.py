# SPDX-License-Identifier: Apache-2.0
"""The vLLM V1 KV connector: the only place that imports vLLM.

``connector`` is the facade that vLLM loads; it forwards by role to ``scheduler`` (in EngineCore)
or ``worker``. Version differences live in ``compat``.

Importing it raises UnsupportedVersion where vLLM is one that must not run.
"""

from xinference_xavier.installed import require

# Before vLLM is imported: names that another version lacks would tell nobody what to do.
require("vllm")
