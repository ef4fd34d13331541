# SPDX-License-Identifier: Apache-2.0
"""A directory with faults at its boundary: ``python -m tests.faults.directory PORT``."""

from __future__ import annotations

import sys

from tests.faults.boundaries import install_directory
from xinference_xavier.control.directory_actor import run_directory

if __name__ == "__main__":
    install_directory()
    run_directory("127.0.0.1", int(sys.argv[1]), lambda address: print(address, flush=True))
