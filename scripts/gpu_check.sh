#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the CUDA path on a machine with a GPU: see gpu_check.sh --help and docs/gpu.md.
#   PYTHON   the interpreter that has PyTorch (default: .venv's, if there is one, else python3)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
default=python3
[ -x "$root/.venv/bin/python" ] && default="$root/.venv/bin/python"
exec "${PYTHON:-$default}" "$root/scripts/gpu_check.py" "$@"
