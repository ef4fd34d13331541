# SPDX-License-Identifier: Apache-2.0
"""Names by which this extension's processes find each other."""

from __future__ import annotations

from typing import Final

NAME: Final = "xinference-xavier"
"""The extension, to Xinference."""

RECORD_FINAL: Final = "record_final"
FINAL_REPORTS: Final = "final_reports"
KEEP_SECRET: Final = "keep_secret"
GROUP_SECRET: Final = "group_secret"
"""Operations of the extension in the supervisor's process."""

METRICS_SINK: Final = "xinference_xavier_replicas"
"""What replicas report their metrics to, in their worker's process, in Xinference's words."""

SUPERVISOR_UID: Final = "supervisor"
WORKER_UID: Final = "worker"
"""Xinference's own uids of these actors; importing their classes would load all of it."""
