#!/usr/bin/env bash
# Checks style and runs the tests: scripts/test.sh [--all] [pytest arguments]. --all runs the slow ones too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare test
cd "$ROOT"
style=0
"$PYTHON" -m ruff check . || style=1
tests=0
"$PYTHON" -m pytest -q "$@" || tests=$?
if [ "$style" -ne 0 ]; then
    echo "error: ruff found faults (see above)" >&2
fi
exit $((tests != 0 ? tests : style))
