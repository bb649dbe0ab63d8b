#!/usr/bin/env bash
# Runs every GPU test on the GPU here and prints a summary: scripts/gpu_check.sh [--workers N] [pytest arguments].
# Kernels are compiled in parallel and run one at a time; a kernel that hangs or faults fails its own test only.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare test
cd "$ROOT"
exec "$PYTHON" scripts/gpu_check.py "$@"
