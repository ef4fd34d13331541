# SPDX-License-Identifier: Apache-2.0
"""Reports of replicas to their worker: one that makes no sense hides none of the others."""

from __future__ import annotations

import contextlib
from typing import Any

from aioprometheus import render
from aioprometheus.collectors import Registry
from hypothesis import given
from prometheus_client.parser import text_string_to_metric_families

from tests.fuzz.lanes import in_both_lanes
from tests.fuzz.mutations import mutated
from tests.metrics_status import status
from xinference_xavier.extension.exporter import PREFIX, ReplicaMetrics

LABELS = {"model_uid": "m", "replica_index": "0", "worker_address": "10.0.0.1:7"}
OTHER = {**LABELS, "replica_index": "1"}


@in_both_lanes(few=100, many=10_000)
@given(report=mutated((LABELS, status())))
def test_a_changed_report_is_refused_or_shown_beside_the_others(report: Any) -> None:
    registry = Registry()
    replicas = ReplicaMetrics(registry, lambda: 0.0)
    replicas.report(OTHER, status(loads=7))
    with contextlib.suppress(Exception):  # it travels to who reported
        replicas.report(*report)
    text = render(registry, [])[0].decode()
    loads = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + "xavier_loads_total" and sample.labels == OTHER
    ]
    assert loads == [7]
