#!/usr/bin/env bash
# Checks style and runs the tests on all cores: scripts/test.sh [--all] [pytest arguments]. --all runs the slow ones too;
# TVM_TILE_TEST_WORKERS sets the number of processes (0: all in one).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare test
cd "$ROOT"
style=0
"$PYTHON" -m ruff check . || style=1
tests=0
"$PYTHON" -m pytest -q -n "${TVM_TILE_TEST_WORKERS:-auto}" --dist worksteal "$@" || tests=$?
if [ "$style" -ne 0 ]; then
    echo "error: ruff found faults (see above)" >&2
fi
exit $((tests != 0 ? tests : style))
