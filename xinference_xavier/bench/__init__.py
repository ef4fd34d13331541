# SPDX-License-Identifier: Apache-2.0
"""``xinference-xavier bench``: what sharing brings, and what it costs.

One module per measurement (``warm``, ``cold``, ``shared``, ``store``, ...), each with a frozen
``Settings`` and a ``run(settings, report)`` that returns plain values for JSON. All comparisons are
ratios between arms of one run, measured in alternating pairs; ``stats`` says when one counts.
"""

from __future__ import annotations

# The group of all commands; these modules add to it.
from xinference_xavier.bench import directory_command, load_commands
from xinference_xavier.bench.commands import command

__all__ = ["command", "directory_command", "load_commands"]
