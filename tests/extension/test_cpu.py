# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from xinference_xavier.extension.vllm.cpu import (
    KV_MOST,
    allowed_cores,
    binding,
    cores_of,
    engine_defaults,
)
from xinference_xavier.extension.vllm.engine import engine_arguments
from xinference_xavier.hostmemory import Bound, HostMemory
from xinference_xavier.options import Deployment, XavierOptions, split_options

GIB = 2**30


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
def test_replicas_share_out_every_core_and_none_twice(replicas: int) -> None:
    cores = [3, 4, 5, 6, 7, 8, 10, 11]
    hands = [cores_of(index, replicas, cores) for index in range(replicas)]
    assert sorted(core for hand, _ in hands for core in hand) == cores
    assert not any(shared for _, shared in hands)
    lengths = {len(hand) for hand, _ in hands}
    assert max(lengths) - min(lengths) <= 1


def test_more_replicas_than_cores_wrap_around_and_say_so() -> None:
    hands = [cores_of(index, 5, [0, 1]) for index in range(5)]
    assert hands == [([0], True), ([1], True), ([0], True), ([1], True), ([0], True)]


def test_a_replica_added_later_shares_cores_and_says_so() -> None:
    assert cores_of(2, 2, [0, 1, 2, 3]) == ([0, 1], True)


def test_only_one_thread_of_each_physical_core_is_dealt_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9})
    for cpu, siblings in {0: "0,8", 1: "1,9", 2: "2-3", 3: "2-3", 8: "0,8", 9: "1,9"}.items():
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert allowed_cores(tmp_path) == [0, 1, 2]


def test_without_a_topology_every_allowed_cpu_is_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2})
    assert allowed_cores(tmp_path) == [2, 5]
    assert binding([2, 5]) == "2,5"


def memory(total: int) -> HostMemory:
    return HostMemory(Bound(total, "total"), Bound(total, "available"))


def test_an_engine_on_a_cpu_gets_one_rank_and_a_share_of_the_memory() -> None:
    assert engine_defaults({}, {}, memory(20 * GIB)) == {
        "tensor_parallel_size": 1,
        "kv_cache_memory_bytes": 2 * GIB,
    }
    assert engine_defaults({}, {}, memory(999 * GIB))["kv_cache_memory_bytes"] == KV_MOST


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        ({"kv_cache_memory_bytes": 5}, {}),
        ({"gpu_memory_utilization": 0.1}, {}),
        ({}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
    ],
)
def test_a_chosen_kv_cache_size_is_left_alone(
    config: dict[str, Any], environment: dict[str, str]
) -> None:
    assert "kv_cache_memory_bytes" not in engine_defaults(config, environment, memory(GIB))


def test_a_chosen_parallel_size_is_left_alone() -> None:
    assert "tensor_parallel_size" not in engine_defaults(
        {"tensor_parallel_size": 2}, {}, memory(GIB)
    )


def test_the_connector_reads_back_what_the_engine_is_given() -> None:
    options = XavierOptions.from_mapping(
        {"xavier_gpu_first": True, "xavier_cpu_cache_bytes": "5%", "xavier_verify": "checksum"}
    )
    deployment = Deployment(
        xavier_directory="10.0.0.1:9999",
        xavier_namespace="m",
        xavier_member="m-rep1",
        xavier_host="10.0.0.2",
    )
    arguments = engine_arguments(options, deployment)
    transfer = arguments["kv_transfer_config"]
    assert split_options(transfer["kv_connector_extra_config"]) == (options, deployment)
    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert arguments["prefix_caching_hash_algo"] == "sha256_cbor"
    assert arguments["enable_prefix_caching"] is True
