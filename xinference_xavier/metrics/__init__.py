# SPDX-License-Identifier: Apache-2.0
"""What is measured: one table, from which both exporters, the docs and the dashboards are made.

``table`` reads a replica's status, as its peer describes it. ``vllm.stats`` carries the values to
vLLM's own metrics, ``extension.exporter`` to those of Xinference's worker.
"""
