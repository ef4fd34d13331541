# SPDX-License-Identifier: Apache-2.0
"""The vLLM V1 KV connector: the only place that imports vLLM.

``connector`` is the facade that vLLM loads; it forwards by role to ``scheduler`` (in EngineCore)
or ``worker``. Version differences live in ``compat``.
"""
