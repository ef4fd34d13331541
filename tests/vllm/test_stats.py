# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's numbers in vLLM's log and in its Prometheus registry, by vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_harness import Clock, Engine, Make, prompt_of, share

from tests.metrics_status import status
from xinference_xavier.metrics.table import LOAD_SECONDS, METRICS, SOURCES, Kind, samples
from xinference_xavier.vllm.counters import MOST_RECENT, Durations
from xinference_xavier.vllm.stats import INTERVAL_S, PREFIX, StatsSource, XavierStats

PROMPT = prompt_of(1, 100)


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def prom(engine: Engine, engines: int = 1) -> KVConnectorProm:
    values: dict[int, list[object]] = {number: ["tiny", str(number)] for number in range(engines)}
    return KVConnectorProm(engine.scheduler.vllm_config, ["model_name", "engine"], values)


def shown(name: str, engine: int = 0, **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": str(engine), **labels}
    return REGISTRY.get_sample_value(PREFIX + name, labels)


def carried(data: dict[str, Any]) -> dict[str, Any]:
    """What is left of statistics on the other side of the engine's socket."""
    stats = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=data))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(stats))
    assert arrived.scheduler_stats.kv_connector_stats == data
    return arrived.scheduler_stats.kv_connector_stats


def test_what_an_idle_engine_has_sent_is_what_its_status_says(engine: Engine) -> None:
    metrics = prom(engine)
    share(engine, 1, PROMPT)
    for prompt in (PROMPT, PROMPT, prompt_of(2, 60)):
        engine.ask(prompt)
    for data in engine.sent:
        metrics.observe(carried(data))
    found = list(samples(engine.side.status()))
    assert {sample.metric.name for sample in found} >= {
        "xavier_hit_tokens_total", "xavier_load_seconds", "xavier_used_bytes"
    }  # fmt: skip
    for sample in found:
        labels = dict(zip(sample.metric.labels, sample.labels, strict=True))
        if sample.metric.kind is Kind.HISTOGRAM:
            count = shown(f"{sample.metric.name}_count", **labels)
            assert count == sum(sample.value["counts"]) == 1
        else:
            assert shown(sample.metric.name, **labels) == sample.value, sample
    assert shown("xavier_hit_tokens_total", source="peer_device") == 96
    assert shown("xavier_hits_total", source="local") == 1
    assert shown("xavier_load_seconds_sum", transport="fake") == pytest.approx(1e-6)
    assert shown("xavier_load_seconds_bucket", transport="fake", le="0.0005") == 1


def test_every_metric_is_registered_and_those_with_known_labels_begin_at_zero(
    engine: Engine,
) -> None:
    prom(engine, engines=2)
    text = prometheus_client.generate_latest().decode()
    for metric in METRICS:
        assert f"# TYPE {PREFIX}{metric.name} {metric.kind}\n" in text
        if not metric.labels:
            assert shown(metric.name, engine=1) == 0
    for source in SOURCES:
        assert shown("xavier_hit_tokens_total", engine=1, source=source) == 0


def test_engines_are_told_apart(engine: Engine) -> None:
    metrics = prom(engine, engines=2)
    metrics.observe({"xavier_loads_total": [[[], 3]]}, 1)
    metrics.observe({"xavier_loads_total": [[[], 1]]}, 0)
    assert [shown("xavier_loads_total", number) for number in (0, 1)] == [1, 3]


def test_two_api_servers_that_share_the_work_add_up(make: Make) -> None:
    engine = make()
    first = prom(engine)
    share(engine, 1, PROMPT)
    engine.ask(PROMPT)
    engine.ask(prompt_of(3, 50))
    half = len(engine.sent) // 2
    assert half
    for data in engine.sent[:half]:
        first.observe(data)
    early = shown("xavier_saved_blocks_total") or 0
    unregister_vllm_metrics()
    second = prom(engine)
    for data in engine.sent[half:]:
        second.observe(data)
    total = early + (shown("xavier_saved_blocks_total") or 0)
    assert total == engine.traffic["saved_blocks"]


def test_several_ranks_are_counted_once(make: Make) -> None:
    engine = make(ranks=2)
    metrics = prom(engine)
    share(engine, 1, PROMPT)
    engine.ask(PROMPT)
    for data in engine.sent:
        metrics.observe(data)
    assert shown("xavier_loads_total") == 1
    assert shown("xavier_hits_total", source="peer_device") == 1
    assert shown("xavier_load_seconds_count", transport="fake") == 1
    # Bytes are those of all ranks, as the capacities are.
    assert shown("xavier_load_bytes_total", transport="fake") == 2 * 6 * 4096
    assert shown("xavier_capacity_bytes", tier="device") == 2 * 24 * 4096


def test_the_log_shows_an_interval(engine: Engine) -> None:
    share(engine, 1, PROMPT)
    engine.ask(PROMPT)
    logging = KVConnectorLogging(engine.scheduler.vllm_config.kv_transfer_config)
    for data in engine.sent:
        logging.observe(carried(data))
    lines: list[str] = []
    logging.log(lambda text, *values: lines.append(text % values))
    assert "Xavier peer_device tokens=96" in lines[0]
    assert "Xavier loads=1" in lines[0]
    logging.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1


class FakeStatus:
    """A status whose counter, gauge and load times a test changes."""

    def __init__(self) -> None:
        self.durations = {"shm": Durations()}
        self.loads = 0
        self.asked = 0
        self.clock = Clock()
        self.source = StatsSource(self.read, self.durations, self.clock)

    def read(self) -> dict[str, Any]:
        self.asked += 1
        read = status(loads=self.loads, device_blocks=self.loads % 3)
        read["traffic"]["load_seconds"] = {"shm": self.durations["shm"].to_dict()}
        return read


def test_a_busy_engine_looks_now_and_then_and_an_idle_one_after_each_step() -> None:
    fake = FakeStatus()
    assert fake.source.take(idle=False) is not None
    for _ in range(5):
        fake.loads += 1
        assert fake.source.take(idle=False) is None
    assert fake.asked == 1
    told = fake.source.take(idle=True)
    assert told is not None
    assert told.data["xavier_loads_total"] == [[[], 5]]
    assert fake.source.take(idle=True) is None
    fake.loads += 1
    fake.clock.now += INTERVAL_S
    assert fake.source.take(idle=False) is not None


def test_statistics_that_come_together_say_the_same_as_one_by_one() -> None:
    fake = FakeStatus()
    taken = []
    for step in range(4):
        fake.loads += step
        fake.durations["shm"].add(0.01 * (step + 1))
        stats = fake.source.take(idle=True)
        assert stats is not None
        taken.append(stats)
    together = XavierStats({})
    assert together.is_empty()
    for stats in taken:
        together.aggregate(stats)
    assert together.data["xavier_loads_total"] == [[[], 6]]
    assert together.data["xavier_load_seconds"] == [[["shm"], [0.01, 0.02, 0.03, 0.04]]]
    assert together.data["xavier_used_bytes"] == [[["device"], 0], [["host"], 400]]
    together.reset()
    assert together.is_empty()


def test_a_closed_or_starting_replica_sends_nothing(make: Make) -> None:
    engine = make()
    engine.ask(PROMPT)
    engine.sent.clear()
    engine.side.close(1.0)
    engine.ask(prompt_of(2, 60))
    assert engine.sent == []
    assert list(samples({"state": "starting"})) == []


def test_load_times_fall_into_buckets_and_are_kept_until_taken() -> None:
    durations = Durations()
    for seconds in (0.0, LOAD_SECONDS[0], LOAD_SECONDS[0] * 1.01, LOAD_SECONDS[-1] + 1):
        durations.add(seconds)
    counts = durations.to_dict()["counts"]
    assert isinstance(counts, list)
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert len(durations.take()) == 4
    assert durations.take() == []
    for _ in range(MOST_RECENT + 5):
        durations.add(1.0)
    assert len(durations.take()) == MOST_RECENT
    assert sum(durations.counts) == MOST_RECENT + 9
