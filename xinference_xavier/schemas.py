# SPDX-License-Identifier: Apache-2.0
"""What the HTTP API under ``/v1/xavier`` takes and gives.

The routes, the command line's client and the console use these models. Tiers are called ``gpu``
and ``cpu`` as in the options' names; on a CPU-only host the first is host memory, and ``device``
says so. Sizes are bytes of one replica over all of its ranks.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, model_validator

Budget = StrictInt | StrictFloat | str
"""What ``sizes.parse_size`` reads: bytes, or text such as "256MiB" or "10%". ``true`` and
``false`` are no sizes: as numbers they would empty a running store."""


class Problem(BaseModel):
    """Xinference's form of an error."""

    detail: str


class TierUse(BaseModel):
    """One tier of a running replica. ``leased`` is part of ``used``; free is limit - used."""

    capacity_blocks: int = Field(description="Blocks that fit into what was allocated at start")
    limit_blocks: int = Field(description="Blocks that it may hold now")
    used_blocks: int
    leased_blocks: int
    capacity_bytes: int
    limit_bytes: int
    used_bytes: int
    leased_bytes: int


class PromptTokens(BaseModel):
    """Prompt tokens since start, and how many came from where; the rest was computed."""

    prompt: int
    local: int = Field(description="From vLLM's own prefix cache")
    own_device: int
    own_host: int
    peer_device: int
    peer_host: int


class Link(BaseModel):
    """What one replica reads from another."""

    replica: str
    transport: str | None = Field(description="null: nothing was read yet")
    usable: bool = Field(description="Whether it would be asked now")
    reason: str | None = Field(description="Why it would not be")
    loads: int
    failures: int
    blocks: int
    bytes: int
    seconds: float = Field(description="Of the loads that brought something, connecting included")
    bytes_per_s: float | None = Field(description="bytes / seconds")


ReplicaState = Literal["ready", "starting", "closed", "unreachable", "missing"]


class Replica(BaseModel):
    """One replica of a GPU-first model. What is not known of it is null or empty."""

    replica: str
    address: str | None = Field(description="Of its peer; null if it is not in the directory")
    state: ReplicaState = Field(
        description="missing: Xinference has it as READY, the directory does not know it"
    )
    error: str | None = None
    device: str | None = None
    block_tokens: int | None = None
    block_bytes: int | None = Field(default=None, description="Rounded up to a slot")
    gpu: TierUse | None = None
    cpu: TierUse | None = None
    requests: int | None = None
    tokens: PromptTokens | None = None
    bypassed: dict[str, int] = {}
    saved_blocks: int | None = None
    demotions: int | None = None
    evictions: int | None = Field(
        default=None, description="Blocks gone to make room, or for a lower limit"
    )
    skips: dict[str, int] = Field(default={}, description="Blocks not stored, by reason")
    load_failures: dict[str, int] = Field(default={}, description="By reason")
    links: list[Link] = []
    transport_refusals: dict[str, int] = {}


class DescribedReplica(Replica):
    """A replica and all that it says of itself."""

    status: dict[str, Any] | None = Field(
        default=None, description="For people: its keys change from version to version"
    )


class ClosedReplica(BaseModel):
    """The final counters of a replica that was stopped."""

    model_uid: str
    replica: str
    counters: dict[str, Any]


class Model(BaseModel):
    """A model with GPU-first replicas."""

    model_uid: str
    model_name: str | None = Field(description="null: Xinference knows the model no more")
    status: str | None = Field(description="Xinference's word for the whole model")
    replica: int = Field(description="Number of replicas that Xinference knows of")
    replicas: list[Replica] = Field(description="By name")


class ModelList(BaseModel):
    """The models that have GPU-first replicas."""

    models: list[Model]


class ModelStatus(BaseModel):
    """A model, its replicas in full, and what stopped ones left."""

    model_uid: str
    model_name: str | None
    status: str | None
    replica: int
    replicas: list[DescribedReplica]
    closed: list[ClosedReplica]


class ClearedReplica(BaseModel):
    """What became of one replica's store."""

    replica: str
    address: str | None = Field(description="Of its peer; null if it is not in the directory")
    cleared: bool = Field(description="Whether no block that it had stored can be read any more")
    error: str | None = Field(description="Why it was not cleared, or is not known to be")


class ClearedModel(BaseModel):
    """What became of the stores of a model's replicas."""

    model_uid: str
    complete: bool = Field(description="Whether every replica was cleared")
    replicas: list[ClearedReplica] = Field(description="By name")


class AuditedReplica(BaseModel):
    """What the check of one replica's bookkeeping found."""

    replica: str
    address: str | None = Field(description="Of its peer; null if it is not in the directory")
    contradiction: str | None = Field(description="The first thing found wrong")
    in_use: dict[str, int] = Field(
        description="Requests, loads, jobs, leases and pins by name, without those that are zero"
    )
    error: str | None = Field(description="Why it was not checked")


class AuditedModel(BaseModel):
    """What the check of a model's replicas found."""

    model_uid: str
    consistent: bool = Field(description="Whether every replica was checked and nothing is wrong")
    replicas: list[AuditedReplica] = Field(description="By name")


class BudgetsRequest(BaseModel):
    """New logical limits of all replicas; null leaves a tier as it is.

    A percentage is a share of what was allocated at start.
    """

    model_config = ConfigDict(extra="forbid")

    gpu: Budget | None = None
    cpu: Budget | None = None

    @model_validator(mode="after")
    def _one_at_least(self) -> BudgetsRequest:
        if self.gpu is None and self.cpu is None:
            raise ValueError("give gpu, cpu or both")
        return self


NO_MEMORY_RETURNED: Final = (
    "These are logical limits: unleased blocks above them are gone at once, leased ones go when "
    "their leases end, and no memory is returned. To give memory back, relaunch the model with "
    "smaller budgets."
)


class LimitedReplica(BaseModel):
    """What became of one replica's limits."""

    replica: str
    address: str | None
    applied: bool
    error: str | None
    evicted_blocks: int
    gpu: TierUse | None
    cpu: TierUse | None


class BudgetsResult(BaseModel):
    """What became of the limits of a model's replicas."""

    model_uid: str
    complete: bool = Field(description="Whether every replica has the new limits")
    memory_returned: Literal[False] = False
    note: str = NO_MEMORY_RETURNED
    replicas: list[LimitedReplica] = Field(description="By name")


class PlanRequest(BaseModel):
    """A launch, or the numbers of a model, and the budgets.

    Names are those of launch arguments, so a launch's own body is a valid request. Of the model,
    numbers win over what its configuration says.
    """

    model_config = ConfigDict(extra="allow")

    model_uid: str | None = Field(default=None, description="Of a running model, without a name")
    model_name: str | None = None
    model_format: str | None = None
    model_size_in_billions: int | float | str | None = None
    quantization: str | None = None
    model_path: str | None = Field(
        default=None, description="Directory on the server's host; needs the scope models:write"
    )
    layers: int | None = Field(default=None, ge=1, le=10_000)
    kv_heads: int | None = Field(default=None, ge=1, le=100_000)
    head_dim: int | None = Field(default=None, ge=1, le=1_000_000)
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = Field(default=None, ge=1, le=1_000_000)
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000)
    replica: int | None = Field(default=None, ge=1, le=100_000)
    xavier_gpu_cache_bytes: Budget | None = None
    xavier_cpu_cache_bytes: Budget | None = None
    xavier_transport: str | None = None


class PlanNote(BaseModel):
    """An error or a warning: ``code`` for programs, ``message`` for people."""

    field: str | None = Field(description="The launch argument to change")
    code: str
    message: str


class PlannedModel(BaseModel):
    """What is known of the model's KV cache, and from where."""

    name: str | None = None
    source: Literal["numbers", "config", "replica", "unknown"]
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    reason: str | None = Field(default=None, description="Why a block's size is not known")


class TierPlan(BaseModel):
    """What fits into a tier. null: not known."""

    budget_bytes: int | None
    blocks: int | None = Field(description="Without the reserved ones")
    tokens: int | None
    reserved_blocks: int | None = Field(description="Kept free for blocks on their way")
    unused_bytes: int | None = Field(description="Less than one block")


class PlanTiers(BaseModel):
    """Both tiers."""

    gpu: TierPlan
    cpu: TierPlan


class PlanLimits(BaseModel):
    """The largest budget of a tier that fits now, beside the other one as it is; null: unknown."""

    gpu_bytes: int | None = None
    cpu_bytes: int | None = None


class Plan(BaseModel):
    """What the budgets hold. ``gpu_blocks`` and its like are those of one replica."""

    valid: bool = Field(description="Whether a launch would be accepted, as far as can be told")
    errors: list[PlanNote]
    warnings: list[PlanNote]
    model: PlannedModel
    block_tokens: int
    block_bytes: int | None
    slot_bytes: int | None
    replica: int
    device: Literal["cpu", "cuda"] | None = Field(description="null: not known here")
    gpu_blocks: int | None
    gpu_tokens: int | None
    cpu_blocks: int | None
    cpu_tokens: int | None
    per_replica: PlanTiers
    total: PlanTiers
    limits: PlanLimits


class ClusterWorker(BaseModel):
    """One worker of the cluster."""

    address: str
    extension: str | None = Field(description="Version of this package there")
    error: str | None = Field(description="Why it is not known")


class Cluster(BaseModel):
    """What the server and its workers run."""

    version: str = Field(description="Of this package, in the API's process")
    versions: dict[str, str | None] = Field(description="By distribution, in the API's process")
    supervisor: str
    local: bool = Field(description="Whether everything runs on one host")
    workers: list[ClusterWorker]
