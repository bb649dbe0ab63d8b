#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [--all] [pytest arguments]. --all runs the slow ones too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare test
cd "$ROOT"
"$PYTHON" -m ruff check . || { echo "error: ruff found faults (see above)" >&2; exit 1; }
exec "$PYTHON" -m pytest -q "$@"
