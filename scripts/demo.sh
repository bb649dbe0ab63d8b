#!/usr/bin/env bash
# Compiles FlashMLA decode, runs it on the best device here and checks it against torch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
prepare torch
cd "$ROOT"
exec "$PYTHON" -m tvm_tile run flash_mla "$@"
