# SPDX-License-Identifier: Apache-2.0
"""A running server: the extension on its workers, its replicas, and what they read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xinference_xavier.doctor.finding import Finding, fail, ok, warn
from xinference_xavier.doctor.ports import listeners, port_finding
from xinference_xavier.doctor.software import EXTENSIONS, FACTORY, version_findings
from xinference_xavier.schemas import Cluster, DescribedReplica, Link, ModelStatus

SLOW: Final = frozenset({"xoscar"})
"""Transports that copy over sockets."""


def cluster_findings(cluster: Cluster) -> Iterator[Finding]:
    """Judge what the server and its workers run, and who reaches their ports."""
    # Which versions its own environment names is not known here.
    yield from version_findings(cluster.versions, "at the server", {})
    yield port_finding("supervisor's port", cluster.supervisor, listeners)
    if not cluster.workers:
        yield fail("workers", "the supervisor has none", "start xinference-worker")
    for worker in cluster.workers:
        name = f"worker {worker.address}"
        if worker.extension is None:
            yield fail(
                name,
                str(worker.error),
                f"start it with {EXTENSIONS}={FACTORY}, as the supervisor",
            )
        elif worker.extension != cluster.version:
            yield warn(
                name,
                f"has version {worker.extension} of this package, the server {cluster.version}",
                "install the same version everywhere",
            )
        else:
            yield ok(name, f"has the extension, version {worker.extension}")
        if worker.address != cluster.supervisor:
            yield port_finding(f"port of worker {worker.address}", worker.address, listeners)


def model_findings(model: ModelStatus) -> Iterator[Finding]:
    """Judge the replicas of a model, and each ordered pair of them by what it has really read."""
    for replica in model.replicas:
        yield _replica_finding(replica)
        if replica.address is not None:
            name = f"peer port of {replica.replica}"
            yield port_finding(name, replica.address, listeners)
    ready = [replica for replica in model.replicas if replica.state == "ready"]
    if len(ready) == 1:
        yield warn(
            f"model {model.model_uid}",
            "has one replica, which has nobody to share with",
            "add one: xinference launch --replica 2, or scale it up in the web page",
        )
    for reader in ready:
        links = {link.replica: link for link in reader.links}
        for source in ready:
            if source is not reader:
                yield _pair_finding(reader, source.replica, links.get(source.replica))


def _replica_finding(replica: DescribedReplica) -> Finding:
    name = f"replica {replica.replica}"
    if replica.state == "ready":
        control = (replica.status or {}).get("control", {})
        if control.get("connected", True):
            return ok(name, f"ready, store in {replica.device} memory")
        return fail(
            name,
            f"does not reach its directory: {control.get('directory_error')}",
            "let it through to the supervisor's port; sharing comes back by itself",
        )
    if replica.state == "starting":
        return warn(name, "is starting", "wait, and ask again")
    return fail(
        name,
        f"{replica.state}: {replica.error or 'its store is closed'}",
        "see the log of its worker; let this host through to the replica's ports, or relaunch it",
    )


def _pair_finding(reader: DescribedReplica, source: str, link: Link | None) -> Finding:
    name = f"{reader.replica} reads {source}"
    refusals = "; ".join(reader.transport_refusals)
    if link is None:
        return fail(
            name,
            "it does not know that replica",
            "they run different weights, engines or options: compare the replicas' options in "
            "xinference-xavier status MODEL --json",
        )
    if not link.usable:
        return fail(
            name,
            f"set aside: {link.reason or 'it does not answer'}",
            "let the replicas' hosts through to each other; all ports of a replica are dynamic",
        )
    if link.transport is None:
        return ok(name, "known, nothing read yet")
    speed = "" if link.bytes_per_s is None else f", {link.bytes_per_s / 1e9:.2f} GB/s"
    seen = f"{link.transport}{speed} in {link.loads} loads, {link.failures} failures"
    # "cuda_ipc+xoscar", say, where a load read two tiers.
    if SLOW.intersection(link.transport.split("+")):
        return warn(
            name,
            f"{seen}; faster ones were refused: {refusals or 'none was tried'}",
            "shared memory needs one user and one pid namespace, NIXL needs RDMA between hosts",
        )
    if link.failures:
        return warn(name, seen, f"see the reader's log; refused: {refusals or 'nothing'}")
    return ok(name, seen)
