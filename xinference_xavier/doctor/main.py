# SPDX-License-Identifier: Apache-2.0
"""The command ``xinference-xavier doctor``."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import click

from xinference_xavier.cli.output import api_key_option, json_option, write_json
from xinference_xavier.doctor import gpus, host, server, software
from xinference_xavier.doctor.finding import Finding, State, fail, warn
from xinference_xavier.hostmemory import host_memory
from xinference_xavier.installed import installed_versions
from xinference_xavier.rest import Api, ApiError

COLORS = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}


@click.command(
    epilog="Exit codes: 0 nothing fails (there may be warnings); 1 something does; 2 a wrong "
    "option."
)
@click.option(
    "--endpoint",
    envvar="XINFERENCE_ENDPOINT",
    show_envvar=True,
    metavar="URL",
    help="Look at this Xinference server and its replicas, too.",
)
@api_key_option
@json_option
def command(endpoint: str | None, api_key: str | None, json_file: str | None) -> None:
    """Look for what would keep replicas from sharing.

    Looks at this host: versions, configuration, memory and its limits, GPUs; and sends bytes
    between two processes over each transport. With --endpoint also at a running server: the
    extension on its workers, who can connect to its ports, its replicas and how they read from
    each other; and reads blocks of every replica from here, over each transport. Run it on a host
    of the cluster then: what it reads there is what a replica there would read.

    Each finding says what was seen, and what to do about it.
    """
    findings = []
    shown = json_file != "-"
    for finding in _findings(endpoint, api_key):
        findings.append(finding)
        if shown:
            _show(finding)
    states = Counter(finding.state for finding in findings)
    worst = State.FAIL if states[State.FAIL] else State.WARN if states[State.WARN] else State.OK
    result = {
        "state": worst,
        "counts": {state.value: states[state] for state in State},
        "findings": [asdict(finding) for finding in findings],
    }
    if write_json(json_file, result):
        click.echo(", ".join(f"{states[state]} {state}" for state in State))
    if states[State.FAIL]:
        raise click.exceptions.Exit(1)


def _findings(endpoint: str | None, api_key: str | None) -> Iterator[Finding]:
    yield from software.version_findings(installed_versions(), "here", os.environ)
    yield software.extension_finding(os.environ)
    yield software.hash_seed_finding(os.environ)
    yield host.memory_finding(host_memory())
    found = list(gpus.gpu_findings())
    yield from found
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_gpu = any(finding.name == "GPU driver" for finding in found)
    yield host.memlock_finding(limit, bool(host.rdma_devices()), has_gpu)
    yield from host.process_findings()
    yield from _paths(None)
    if endpoint is not None:
        yield from _server(endpoint, api_key)


def _server(endpoint: str, api_key: str | None) -> Iterator[Finding]:
    try:
        api = Api(endpoint, api_key)
        cluster = api.cluster()
        yield from server.cluster_findings(cluster)
        models = api.models().models
        if not models:
            yield warn(
                "models",
                "no GPU-first model runs",
                "launch one with enable_xavier=true and xavier_gpu_first=true",
            )
        for model in models:
            yield from server.model_findings(api.model(model.model_uid))
            yield from _paths((cluster.supervisor, model.model_uid))
    except ApiError as error:
        yield fail("server", str(error), "check --endpoint and --api-key; is the server running?")


def _paths(group: tuple[str, str] | None) -> Iterable[Finding]:
    """Send bytes: within this host, or from the replicas of ``group`` (directory, model)."""
    try:
        from xinference_xavier.doctor import probe
    except ImportError as error:
        return [
            warn(
                "paths",
                f"no bytes were sent, for {error.name} is not installed",
                "run the doctor where a replica runs, in its environment",
            )
        ]
    whose = "this host" if group is None else f"the replicas of {group[1]}"
    click.echo(f"Reading from {whose} over each transport; this can take a minute ...", err=True)
    return probe.host_paths() if group is None else probe.replica_paths(*group)


def _show(finding: Finding) -> None:
    state = click.style(f"{finding.state:<4}", COLORS[finding.state])
    click.echo(f"{state}  {finding.name}: {finding.seen}")
    if finding.fix:
        click.echo(f"      -> {finding.fix}")
