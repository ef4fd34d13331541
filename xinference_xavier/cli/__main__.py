# SPDX-License-Identifier: Apache-2.0
"""``python -m xinference_xavier.cli``"""

from __future__ import annotations

from xinference_xavier.cli import main

if __name__ == "__main__":
    main(prog_name="xinference-xavier")
