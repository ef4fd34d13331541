# SPDX-License-Identifier: Apache-2.0
"""Say clearly why this interpreter cannot make the environment. Runs on old ones too."""

import platform
import sys

OLDEST = (3, 11)
NEWEST = (3, 13)


def main():
    """Exit with a message unless version and platform are ones that vLLM's CPU build has."""
    major, minor = sys.version_info[:2]
    found = f"This is Python {major}.{minor} on {platform.system()}"
    if not OLDEST <= (major, minor) <= NEWEST:
        sys.exit(
            f"{found}; Python {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} is needed. "
            "Name another interpreter: make PYTHON=python3.11 ..."
        )
    if platform.system() != "Linux":
        sys.exit(f"{found}; the project runs on Linux only.")


main()
