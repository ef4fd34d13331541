# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinference_xavier.hostmemory import Bound, HostMemory
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.preflight import (
    CONTEXT_BYTES,
    COPY_SCRATCH_BYTES,
    DEVICE_STAGING_BYTES,
    ENGINE_RESERVE,
    TRANSPORT_BYTES,
    UNKNOWN_DEVICE,
    Budgets,
    DeviceMemory,
    EngineClaim,
    check_budgets,
    check_device_room,
    device_need,
    device_staging_slots,
    largest_budget,
    make_room,
)

GIB = 2**30
MIB = 2**20

BESIDE = DEVICE_STAGING_BYTES + COPY_SCRATCH_BYTES + TRANSPORT_BYTES
"""What the store takes of a device beside its tier."""

GPU = DeviceMemory("GPU 3", total=24 * GIB, available=23 * GIB, index=3)


def options(**values: object) -> XavierOptions:
    return XavierOptions.from_mapping({"xavier_gpu_first": True, **values})


def gpu_budget(size: object, **values: object) -> XavierOptions:
    return options(xavier_gpu_cache_bytes=size, **values)


def host(
    total: int = 100 * GIB, available: int | None = None, process: int | None = None
) -> HostMemory:
    return HostMemory(
        total=Bound(total, "the total"),
        available=Bound(total if available is None else available, "the limit hit"),
        process=None if process is None else Bound(process, "ulimit -v (RLIMIT_AS)"),
    )


def test_on_a_cpu_host_both_tiers_are_host_memory_and_default_to_a_share_of_it() -> None:
    assert check_budgets(options(), host=host(100 * GIB)) == Budgets(256 * MIB, 10 * GIB)


def test_percentages_are_shares_of_the_device_and_of_the_host() -> None:
    chosen = options(xavier_gpu_cache_bytes="5%", xavier_cpu_cache_bytes="20%")
    device = DeviceMemory("GPU 0", 40 * GIB, 39 * GIB)
    assert check_budgets(chosen, device=device, host=host(100 * GIB)) == Budgets(2 * GIB, 20 * GIB)


@pytest.mark.parametrize(("replicas", "fits"), [(4, True), (5, False)])
def test_replicas_of_one_host_are_summed_over_both_tiers(replicas: int, fits: bool) -> None:
    chosen = options(xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="1GiB")
    memory = host(64 * GIB, available=8 * GIB)
    if fits:
        check_budgets(chosen, replicas_on_host=replicas, host=memory)
        return
    with pytest.raises(OptionError) as refused:
        check_budgets(chosen, replicas_on_host=replicas, host=memory)
    message = str(refused.value)
    assert "need 10 GiB on this host (5 x 2 GiB)" in message
    assert "has 8 GiB (limit: the limit hit)" in message
    assert "Lower xavier_gpu_cache_bytes, xavier_cpu_cache_bytes" in message


def test_with_a_device_only_the_cpu_tier_is_host_memory() -> None:
    chosen = options(xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="2GiB")
    check_budgets(chosen, replicas_on_host=2, device=GPU, host=host(available=4 * GIB))
    with pytest.raises(OptionError, match="Lower xavier_cpu_cache_bytes or the number"):
        check_budgets(chosen, replicas_on_host=2, device=GPU, host=host(available=4 * GIB - 1))


def test_memory_promised_to_launches_in_progress_is_not_given_twice() -> None:
    chosen = options(xavier_gpu_cache_bytes=0, xavier_cpu_cache_bytes="2GiB")
    memory = host(available=4 * GIB)
    check_budgets(chosen, reserved=2 * GIB, host=memory)
    with pytest.raises(OptionError, match="and 3 GiB for launches in progress"):
        check_budgets(chosen, reserved=3 * GIB, host=memory)


def test_one_process_may_be_limited_where_the_host_is_not() -> None:
    chosen = options(xavier_gpu_cache_bytes="1GiB", xavier_cpu_cache_bytes="1GiB")
    check_budgets(chosen, replicas_on_host=9, host=host(process=2 * GIB))
    with pytest.raises(OptionError, match=r"one process, which may have 1\.9.*RLIMIT_AS"):
        check_budgets(chosen, host=host(process=2 * GIB - 64 * MIB))


# --- a device: what the store takes of it, and out of what -------------------------------------


def test_what_the_store_takes_of_a_device_is_named_part_by_part() -> None:
    need = device_need(gpu_budget("256MiB"), 256 * MIB)
    assert need.bytes == 256 * MIB + BESIDE
    assert str(need) == (
        "256 MiB for the tier, 32 MiB of staging for reads over the network, "
        "32 MiB of scratch for copies, 32 MiB for buffers of NIXL and UCX"
    )


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc", "xoscar"])
def test_without_nixl_nothing_is_taken_for_it(transport: str) -> None:
    chosen = gpu_budget("256MiB", xavier_transport=transport)
    assert device_need(chosen, 256 * MIB).bytes == 256 * MIB + COPY_SCRATCH_BYTES
    assert device_staging_slots(chosen, 196608) == 0


@pytest.mark.parametrize(("slot_bytes", "slots"), [(196608, 170), (32 * MIB, 1), (40 * MIB, 1)])
def test_staging_is_whole_slots_and_at_least_one(slot_bytes: int, slots: int) -> None:
    chosen = gpu_budget("256MiB")
    assert device_staging_slots(chosen, slot_bytes) == slots
    assert device_need(chosen, 256 * MIB, slot_bytes=slot_bytes).staging == slots * slot_bytes


def test_a_device_tier_of_nothing_needs_no_staging() -> None:
    assert device_need(gpu_budget(0), 0).bytes == COPY_SCRATCH_BYTES + TRANSPORT_BYTES


def test_the_store_comes_out_of_vllms_share() -> None:
    claim = make_room(gpu_budget("1GiB"), GPU, EngineClaim(0.9))
    assert list(claim.arguments()) == ["gpu_memory_utilization"]
    taken = (0.9 - claim.utilization) * GPU.total
    assert 0 <= taken - (GIB + BESIDE) < GPU.total / 1e6 + 1


def test_the_store_comes_out_of_a_given_kv_cache() -> None:
    claim = make_room(gpu_budget("1GiB"), GPU, EngineClaim(0.9, kv_bytes=8 * GIB))
    assert claim.arguments() == {"kv_cache_memory_bytes": 7 * GIB - BESIDE}


def test_a_percentage_of_the_device_comes_out_of_the_share_too() -> None:
    claim = make_room(gpu_budget("25%"), GPU, EngineClaim(0.9))
    assert claim.utilization == pytest.approx(0.65 - BESIDE / GPU.total, abs=2e-6)


def test_a_budget_that_leaves_no_room_for_the_model_is_refused_with_the_largest_that_fits() -> None:
    claim = EngineClaim(0.5, weights=8 * GIB)
    with pytest.raises(OptionError) as refused:
        make_room(gpu_budget("4GiB"), GPU, claim)
    message = str(refused.value)
    assert "xavier_gpu_cache_bytes=4 GiB: the store needs 4.09 GiB of GPU 3" in message
    assert "4 GiB for the tier, 32 MiB of staging" in message
    assert "and has 3 GiB" in message
    assert "gpu_memory_utilization=0.5 gives vLLM 12 GiB" in message
    assert "at least 8 GiB for weights and 1 GiB to run" in message
    largest = 12 * GIB - 8 * GIB - ENGINE_RESERVE - BESIDE
    assert f"The largest budget that fits is {largest} bytes (2.91 GiB)" in message
    assert message.endswith("lower xavier_gpu_cache_bytes, or raise gpu_memory_utilization")


def test_a_kv_cache_smaller_than_the_store_is_refused() -> None:
    with pytest.raises(OptionError, match="or raise kv_cache_memory_bytes"):
        make_room(gpu_budget("1GiB"), GPU, EngineClaim(0.9, kv_bytes=GIB))


@given(
    total=st.integers(2 * GIB, 200 * GIB),
    utilization=st.floats(0.05, 1),
    weights=st.integers(0, 100 * GIB),
    kv_bytes=st.none() | st.integers(MIB, 100 * GIB),
    transport=st.sampled_from(["auto", "shm"]),
)
def test_the_largest_budget_fits_and_one_more_byte_does_not(
    total: int, utilization: float, weights: int, kv_bytes: int | None, transport: str
) -> None:
    device = DeviceMemory("GPU 0", total, total)
    claim = EngineClaim(utilization, kv_bytes, weights)
    largest = largest_budget(options(xavier_transport=transport), device, claim)
    if largest:
        fitting = gpu_budget(largest, xavier_transport=transport)
        less = make_room(fitting, device, claim)
        assert less.bytes(total) + device_need(fitting, largest).bytes <= claim.bytes(total) + 1
    with pytest.raises(OptionError):
        make_room(gpu_budget(largest + 1, xavier_transport=transport), device, claim)


def test_a_share_that_is_not_free_is_refused_before_vllm_refuses_it() -> None:
    busy = DeviceMemory("GPU 0", 24 * GIB, 10 * GIB)
    with pytest.raises(OptionError) as refused:
        make_room(gpu_budget("1GiB"), busy, EngineClaim(0.5))
    message = str(refused.value)
    assert "gpu_memory_utilization=0.5 asks for 12 GiB of GPU 0" in message
    assert "10 GiB of 24 GiB free. " in message
    assert "Lower gpu_memory_utilization" in message


def test_what_is_promised_to_others_is_not_given_twice() -> None:
    make_room(gpu_budget("1GiB"), GPU, EngineClaim(0.45), promised=12 * GIB)
    with pytest.raises(OptionError, match="13 GiB of it promised to other replicas"):
        make_room(gpu_budget("1GiB"), GPU, EngineClaim(0.45), promised=13 * GIB)


def test_nothing_is_known_of_some_devices_and_then_nothing_is_changed() -> None:
    claim = EngineClaim(0.9)
    assert make_room(gpu_budget("1GiB"), UNKNOWN_DEVICE, claim) is claim


def test_budgets_are_checked_against_the_claim_where_there_is_one() -> None:
    chosen = gpu_budget("20GiB")
    check_budgets(chosen, device=GPU, host=host())
    with pytest.raises(OptionError, match="The largest budget that fits"):
        check_budgets(chosen, device=GPU, claim=EngineClaim(0.8), host=host())


# --- a device at the engine's start ----------------------------------------------------------


def room(available: int, held: int, claim: EngineClaim, size: str = "1GiB") -> None:
    chosen = gpu_budget(size)
    need = device_need(chosen, chosen.xavier_gpu_cache_bytes.resolve(GPU.total), slot_bytes=196608)
    device = DeviceMemory("cuda:0", GPU.total, available)
    check_device_room(chosen, need, device, claim, held)


def test_a_store_that_was_taken_out_of_the_share_fits_at_the_start() -> None:
    claim = make_room(gpu_budget("1GiB"), GPU, EngineClaim(0.9))
    # The context is outside torch's memory; activations and CUDA graphs are still to come.
    held = claim.bytes(GPU.total) - 3 * GIB
    room(GPU.total - held - 400 * MIB, held, claim)


def test_with_plain_vllm_the_share_must_leave_room_for_the_store() -> None:
    held = int(0.92 * GPU.total) - 2 * GIB
    free = GPU.total - held - 400 * MIB
    room(free, held, EngineClaim(0.92))
    with pytest.raises(OptionError) as refused:
        room(free, held, EngineClaim(0.92), size="4GiB")
    message = str(refused.value)
    assert "xavier_gpu_cache_bytes=4 GiB: the store needs 4.09 GiB of cuda:0" in message
    assert "and has 1.92 GiB" in message
    assert "gpu_memory_utilization=0.92 lets vLLM take 1.61 GiB more" in message
    assert "The largest budget that fits is" in message
    assert message.endswith("or lower gpu_memory_utilization to 0.829")


def test_what_other_processes_use_is_not_taken_for_vllms_context() -> None:
    held, others = 10 * GIB, 8 * GIB
    free = GPU.total - held - others
    # 0.7 of the device less what torch holds and at most so much context is still vLLM's.
    pending = EngineClaim(0.7).bytes(GPU.total) - held - CONTEXT_BYTES
    with pytest.raises(OptionError, match="No budget fits"):
        room(free, held, EngineClaim(0.7))
    assert free < pending


def test_beside_a_given_kv_cache_a_reserve_stays_vllms() -> None:
    claim = EngineClaim(0.9, kv_bytes=8 * GIB)
    room(ENGINE_RESERVE + GIB + BESIDE, 20 * GIB, claim)
    with pytest.raises(OptionError, match=r"lower kv_cache_memory_bytes by 1\.09 GiB"):
        room(ENGINE_RESERVE, 20 * GIB, claim)
