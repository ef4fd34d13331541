# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/ that are generated from the package, or check that they are current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs_reference import api_page, commands_page, table
from docs_scale import scale_page
from make_pictures import pictures

from xinference_xavier.features import VERSIONS, feature_table
from xinference_xavier.installed import override_variable
from xinference_xavier.metrics.table import SOURCES, metric_table
from xinference_xavier.options import Deployment, option_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Generated from the package by `make docs`; edit the source instead. -->\n"

OPTIONS = """
# Options

## What you choose

From Xinference these are launch options: arguments of the Python client's `launch_model`, or
`--name value` of `xinference launch`, beside `enable_xavier`. With plain vLLM they are keys of
`kv_connector_extra_config` in the KV transfer configuration.

{options}

A *size* is a whole number of bytes, or a number with a unit: `B`, `kB`, `MB`, `GB`, `TB` (powers
of 1000) or `KiB`, `MiB`, `GiB`, `TiB` (powers of 1024), in upper or lower case. `10%` is a share
of the device's memory or of the host's memory limit; on a CPU-only host the device is the host.
Budgets are per replica. At least one of the two budgets is more than 0.

`true` and `false` may be given as words. A value that is not allowed, an unknown name, or a
combination that does not work is refused before anything is started, with the value, the limit
and the option to change.

## Where a replica belongs

Xinference's integration fills these in. With plain vLLM they are further keys of
`kv_connector_extra_config`.

{deployment}

The secret that the replicas of a group share is no option, since options are logged: with plain
vLLM it is `XINFERENCE_XAVIER_SECRET` or `XINFERENCE_XAVIER_SECRET_FILE` in the engine's environment
([security](security.md#the-secret)).
"""

FEATURES = """
# What works together

*Supported* features need nothing special. *Bypassed* requests are answered as if there were no
store, and are counted as bypassed, not as misses. *Refused* combinations fail at launch with the
reason and what to do. What is *not detected* is up to you.

{features}

## Versions

{versions}

Other versions, and all that come before a release, are refused at the start. To try one all the
same, name exactly it in the environment of the process that refuses it: with plain vLLM of the
server, in Xinference of each worker, and for `xinference` and `xoscar` of the supervisor, too. It
then runs with a warning, and the next version is refused again.
"""

METRICS = """
# Metrics

## Where they are

- Xinference: `/metrics` of each worker's metrics server (`--metrics-exporter-port`). Names begin
  with `xinference:`, and each metric has the labels `model_uid`, `replica_index` and
  `worker_address`, as Xinference's own have. A worker shows what its replicas told it within the
  last 15 seconds; each tells every 5 seconds, also while it is idle.
- Plain vLLM: `/metrics` of each API server. Names begin with `vllm:`, and each metric has the
  labels `model_name` and `engine`. The numbers come with the engine's steps: those of an engine
  that does nothing, but lends blocks to others, are as of its last step.

There are two dashboards for Grafana: [one for Xinference](grafana/xinference-xavier.json) and
[one for plain vLLM](grafana/vllm-xavier.json). Import one and choose the data source.

## What there is

{metrics}

`source` is one of {sources}:
vLLM's own prefix cache, the replica's own tiers, those of another replica. Hits and their tokens
are counted once per request, when it first runs, whatever the number of the engine's processes.
The hit rate is `xavier_hit_tokens_total` divided by `xavier_prompt_tokens_total`; the rest of the
prompt tokens was computed. Requests that are bypassed are in neither.

## In each answer

A request's prompt tokens by source are in its `usage`, where `cached_tokens` is:

```json
"prompt_tokens_details": {{
  "cached_tokens": 640,
  "xavier": {{"local": 0, "own_device": 0, "own_host": 0, "peer_device": 640, "peer_host": 0}}
}}
```

With plain vLLM they are in `kv_transfer_params.xavier` of an answer that is not streamed. They add
up to what was not computed. `cached_tokens` is vLLM's own number, which is taken before the load:
it is larger after a load that failed, and by one when the whole prompt was found, since the last
token is always computed. Of several answers to one prompt (`n`), both numbers are those of the one
that ended last. An answer that ended at a stop *string* has no sources: vLLM's API side ends such
a request by itself, and what the engine says of it then is lost.
"""


def pages() -> dict[str, str]:
    """Return the text of each generated page and picture by its path below docs."""
    versions = [
        {
            "package": name,
            "from": oldest,
            "below": untried,
            "to try another": f"`{override_variable(name)}=VERSION`",
        }
        for name, (oldest, untried) in VERSIONS.items()
    ]
    options = OPTIONS.format(
        options=table(option_table(), code="name"),
        deployment=table(option_table(Deployment), code="name"),
    )
    features = FEATURES.format(features=table(feature_table()), versions=table(versions))
    metrics = METRICS.format(
        metrics=table(metric_table(), code="name"),
        sources=", ".join(f"`{source}`" for source in SOURCES),
    )
    return {
        "options.md": NOTE + options,
        "features.md": NOTE + features,
        "metrics.md": NOTE + metrics,
        "commands.md": NOTE + commands_page(),
        "api.md": NOTE + api_page(),
        "scale.md": NOTE + scale_page(),
        **pictures(),
    }


def main() -> None:
    """Write the pages; with ``--check`` only exit with the names of those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
