# SPDX-License-Identifier: Apache-2.0
"""Do the budgets fit? The one answer to that question, asked at three points (R10).

The API asks for all replicas of a launch where it knows their host, the worker before it starts a
model's process and that process before it loads the model, and the connector at the engine's
start. All get the same sizes and the same message: need, have, which limit, which option to change.

On an accelerator the store lives inside the share that the launch gives to vLLM: what it needs,
part by part (:class:`DeviceNeed`), is taken out of that share before the model is loaded
(:func:`make_room`), and vLLM then profiles within the rest. No process besides vLLM's own worker
has a context on the device, so there is no part for one. With plain vLLM nobody takes it out, so
the connector can only look at what is left (:func:`check_device_room`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from xinference_xavier.hostmemory import HostMemory, host_memory
from xinference_xavier.options import OptionError, XavierOptions
from xinference_xavier.sizes import format_size

DEVICE_STAGING_BYTES: Final = 32 << 20
"""Slots of the device arena that hold no blocks: reads of a peer's device tier over the network
land there. On top of the tier's budget, at least one slot."""

COPY_SCRATCH_BYTES: Final = 32 << 20
"""What the copies themselves take of a device (tables, and an area through which copies to and
from unpinned host memory go): more than that only with slots of 15 MiB and above."""

TRANSPORT_BYTES: Final = 32 << 20
"""What NIXL and UCX may keep on a device: an estimate, as neither tells."""

STAGING_TRANSPORTS: Final = frozenset({"auto", "nixl"})
"""Values of ``xavier_transport`` that read into device memory over the network."""

ENGINE_RESERVE: Final = 1 << 30
"""What vLLM needs beside the weights (context, activations, CUDA graphs, a small KV cache): an
estimate on the small side, for before the model is loaded. vLLM itself measures it later."""

CONTEXT_BYTES: Final = 512 << 20
"""Most of what a process uses of a device beside torch's memory that is taken for its context."""


@dataclass(frozen=True)
class DeviceMemory:
    """An accelerator's memory in bytes, and the number by which the driver lists it.

    ``total`` 0 means that nothing is known of it.
    """

    name: str
    total: int
    available: int
    index: int = 0


UNKNOWN_DEVICE: Final = DeviceMemory("a GPU whose memory the driver does not tell", 0, 0)


@dataclass(frozen=True)
class EngineClaim:
    """What a launch lets vLLM take of a device.

    ``utilization`` is ``gpu_memory_utilization``; with ``kv_bytes`` (``kv_cache_memory_bytes``)
    vLLM does not size its KV cache by it. ``weights`` are the least bytes of the model's weights,
    as far as its files tell.
    """

    utilization: float
    kv_bytes: int | None = None
    weights: int = 0

    @property
    def setting(self) -> str:
        """The argument that sizes the KV cache, as people write it."""
        if self.kv_bytes is not None:
            return f"kv_cache_memory_bytes={self.kv_bytes}"
        return f"gpu_memory_utilization={self.utilization:g}"

    @property
    def option(self) -> str:
        """Its name."""
        return self.setting.partition("=")[0]

    def bytes(self, total: int) -> int:
        """Return what vLLM takes of a device of ``total`` bytes."""
        if self.kv_bytes is not None:
            return self.weights + ENGINE_RESERVE + self.kv_bytes
        return math.ceil(total * self.utilization)

    def spare(self, total: int) -> int:
        """Return how many of these bytes vLLM could do without, below 0 if it needs more."""
        if self.kv_bytes is not None:
            # With 0 vLLM would size its KV cache by the utilization.
            return self.kv_bytes - 1
        return self.bytes(total) - self.weights - ENGINE_RESERVE

    def less(self, need: int, total: int) -> EngineClaim:
        """Return the claim without ``need`` bytes."""
        if self.kv_bytes is not None:
            return replace(self, kv_bytes=self.kv_bytes - need)
        # Rounded down, as vLLM rounds the bytes up.
        millionths = math.floor((self.utilization - need / total) * 1e6)
        return replace(self, utilization=millionths / 1e6)

    def arguments(self) -> dict[str, float | int]:
        """Return the arguments of vLLM's engine that say so."""
        value = self.utilization if self.kv_bytes is None else self.kv_bytes
        return {self.option: value}


@dataclass(frozen=True)
class DeviceNeed:
    """What one rank's store takes of its device, in bytes by what it is for."""

    tier: int
    staging: int
    scratch: int
    transport: int

    @property
    def beside(self) -> int:
        """All but the tier itself."""
        return self.staging + self.scratch + self.transport

    @property
    def bytes(self) -> int:
        """All together."""
        return self.tier + self.beside

    def __str__(self) -> str:
        """Return the parts for people."""
        parts = {
            "for the tier": self.tier,
            "of staging for reads over the network": self.staging,
            "of scratch for copies": self.scratch,
            "for buffers of NIXL and UCX": self.transport,
        }
        return ", ".join(f"{format_size(size)} {name}" for name, size in parts.items() if size)


@dataclass(frozen=True)
class Budgets:
    """What one replica's two tiers may hold, in bytes, before rounding down to whole blocks."""

    device: int
    host: int


def device_staging_slots(options: XavierOptions, slot_bytes: int) -> int:
    """Return how many staging slots a device arena has, beside those of a tier of some size."""
    if options.xavier_transport not in STAGING_TRANSPORTS:
        return 0
    return max(1, DEVICE_STAGING_BYTES // slot_bytes)


def device_need(
    options: XavierOptions,
    tier: int,
    *,
    slot_bytes: int | None = None,
    scratch: int = COPY_SCRATCH_BYTES,
) -> DeviceNeed:
    """Return what a rank whose device tier has ``tier`` bytes takes of its device.

    ``slot_bytes`` and the exact ``scratch`` are known once the model is loaded.
    """
    networked = options.xavier_transport in STAGING_TRANSPORTS
    staging = DEVICE_STAGING_BYTES if networked and tier else 0
    if staging and slot_bytes is not None:
        staging = device_staging_slots(options, slot_bytes) * slot_bytes
    return DeviceNeed(
        tier=tier,
        staging=staging,
        scratch=scratch,
        transport=TRANSPORT_BYTES if networked else 0,
    )


def check_budgets(
    options: XavierOptions,
    *,
    replicas_on_host: int = 1,
    device: DeviceMemory | None = None,
    claim: EngineClaim | None = None,
    promised: int = 0,
    reserved: int = 0,
    host: HostMemory | None = None,
) -> Budgets:
    """Return one replica's budgets in bytes, or raise :class:`OptionError` when they do not fit.

    ``replicas_on_host`` replicas are about to start here. ``device`` None means a CPU-only host,
    whose device tier is host memory too; with a ``claim`` the device tier must fit into it, as in
    :func:`make_room`. ``reserved`` bytes of the host's memory were promised to others that have
    not allocated them yet. ``host`` is measured when not given.
    """
    host = host or host_memory()
    budgets = Budgets(
        device=options.xavier_gpu_cache_bytes.resolve(device.total if device else host.total.bytes),
        host=options.xavier_cpu_cache_bytes.resolve(host.total.bytes),
    )
    if device is not None and claim is not None:
        make_room(options, device, claim, promised)
    _check_host(options, budgets, replicas_on_host, reserved, device is None, host)
    return budgets


def make_room(
    options: XavierOptions, device: DeviceMemory, claim: EngineClaim, promised: int = 0
) -> EngineClaim:
    """Return the claim that leaves room on the device for the store.

    ``promised`` bytes of the device's available memory belong to others that have not taken them
    yet. A device of which nothing is known gives the claim as it is: the connector looks again.
    Raises :class:`OptionError` when vLLM's share is not there, or too small for model and store.
    """
    if not device.total:
        return claim
    tier = options.xavier_gpu_cache_bytes.resolve(device.total)
    need = device_need(options, tier)
    share, free = claim.bytes(device.total), max(0, device.available - promised)
    if share > free:
        waiting = f", {format_size(promised)} of it promised to other replicas" if promised else ""
        raise OptionError(
            f"{claim.setting} asks for {format_size(share)} of {device.name}, which has "
            f"{format_size(device.available)} of {format_size(device.total)} free{waiting}. "
            f"xavier_gpu_cache_bytes={options.xavier_gpu_cache_bytes} is taken out of that share: "
            f"no budget fits. Lower {claim.option}, or use another GPU"
        )
    spare = claim.spare(device.total)
    if need.bytes > spare:
        why = f"{claim.setting} is what it is taken out of"
        if claim.kv_bytes is None:
            weights = f"{format_size(claim.weights)} for weights and " if claim.weights else ""
            why = (
                f"{claim.setting} gives vLLM {format_size(share)}, which needs at least {weights}"
                f"{format_size(ENGINE_RESERVE)} to run"
            )
        have = max(0, spare)
        raise _too_much(options, need, device, have=have, why=why, instead=f"raise {claim.option}")
    return claim.less(need.bytes, device.total)


def largest_budget(
    options: XavierOptions, device: DeviceMemory, claim: EngineClaim, promised: int = 0
) -> int:
    """Return the largest device budget in bytes that :func:`make_room` takes; 0 if none."""
    if claim.bytes(device.total) > device.available - promised:
        return 0
    beside = device_need(options, tier=1).beside
    return max(0, claim.spare(device.total) - beside)


def check_device_room(
    options: XavierOptions,
    need: DeviceNeed,
    device: DeviceMemory,
    claim: EngineClaim,
    held: int,
) -> None:
    """Refuse at the engine's start what the device has no room for beside vLLM (R10).

    Called once vLLM has allocated its KV cache, whose process holds ``held`` bytes of the device
    through torch. Of what is free, the part of ``claim`` that vLLM has not taken yet stays its
    own: activations and CUDA graphs come later. Raises :class:`OptionError`.
    """
    used = device.total - device.available
    context = max(0, min(used - held, CONTEXT_BYTES))
    if claim.kv_bytes is None:
        pending = max(0, claim.bytes(device.total) - held - context)
    else:
        pending = ENGINE_RESERVE
    have = max(0, device.available - pending)
    if need.bytes <= have:
        return
    missing = need.bytes - have
    less = math.floor((claim.utilization - missing / device.total) * 1000) / 1000
    instead = f"lower {claim.option} to {less:g}"
    if claim.kv_bytes is not None or less <= 0:
        instead = f"lower {claim.option} by {format_size(missing)}"
    raise _too_much(
        options,
        need,
        device,
        have=have,
        why=f"{format_size(device.available)} are free with the KV cache in place, and "
        f"{claim.setting} lets vLLM take {format_size(pending)} more",
        instead=instead,
    )


def _too_much(
    options: XavierOptions,
    need: DeviceNeed,
    device: DeviceMemory,
    *,
    have: int,
    why: str,
    instead: str,
) -> OptionError:
    largest = have - need.beside
    fits = f"The largest budget that fits is {largest} bytes ({format_size(largest)})"
    if largest <= 0:
        fits = "No budget fits"
    return OptionError(
        f"xavier_gpu_cache_bytes={options.xavier_gpu_cache_bytes}: the store needs "
        f"{format_size(need.bytes)} of {device.name} ({need}) and has {format_size(have)}: {why}. "
        f"{fits}: lower xavier_gpu_cache_bytes, or {instead}"
    )


def _check_host(
    options: XavierOptions,
    budgets: Budgets,
    replicas: int,
    reserved: int,
    both_tiers: bool,
    host: HostMemory,
) -> None:
    each = budgets.host + (budgets.device if both_tiers else 0)
    named = f"xavier_cpu_cache_bytes={options.xavier_cpu_cache_bytes}"
    change = "xavier_cpu_cache_bytes"
    if both_tiers:
        named = (
            f"xavier_gpu_cache_bytes={options.xavier_gpu_cache_bytes} (host memory on a CPU-only "
            f"host) and {named}"
        )
        change = "xavier_gpu_cache_bytes, xavier_cpu_cache_bytes"
    if host.process is not None and each > host.process.bytes:
        raise OptionError(
            f"{named} need {format_size(each)} in one process, which may have "
            f"{format_size(host.process.bytes)} (limit: {host.process.source}). "
            f"Lower {change} or raise that limit"
        )
    need = replicas * each + reserved
    if need <= host.available.bytes:
        return
    waiting = f" and {format_size(reserved)} for launches in progress" if reserved else ""
    raise OptionError(
        f"{named} need {format_size(need)} on this host ({replicas} x {format_size(each)}"
        f"{waiting}), which has {format_size(host.available.bytes)} "
        f"(limit: {host.available.source}). Lower {change} or the number of replicas"
    )
