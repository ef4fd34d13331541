# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/ that are generated from the package, or check that they are current."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from xinference_xavier.features import VERSIONS, feature_table
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
"""

FEATURES = """
# What works together

*Supported* features need nothing special. *Bypassed* requests are answered as if there were no
store, and are counted as bypassed, not as misses. *Refused* combinations fail at launch with the
reason and what to do. What is *not detected* is up to you.

{features}

## Versions

{versions}
"""


def table(rows: Sequence[Mapping[str, str]], code: str = "") -> str:
    """Return rows of equal keys as a Markdown table, the column ``code`` in code style."""
    headings = list(rows[0])
    lines = [[heading.capitalize() for heading in headings], ["---"] * len(headings)]
    for row in rows:
        cells = {heading: text.replace("|", r"\|") for heading, text in row.items()}
        lines.append([f"`{cells[name]}`" if name == code else cells[name] for name in headings])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pages() -> dict[str, str]:
    """Return the text of each generated page by its file name."""
    versions = [
        {"package": name, "from": oldest, "below": untried}
        for name, (oldest, untried) in VERSIONS.items()
    ]
    options = OPTIONS.format(
        options=table(option_table(), code="name"),
        deployment=table(option_table(Deployment), code="name"),
    )
    features = FEATURES.format(features=table(feature_table()), versions=table(versions))
    return {"options.md": NOTE + options, "features.md": NOTE + features}


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
            path.write_text(text, encoding="utf-8")
    if check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
