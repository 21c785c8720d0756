#!/usr/bin/env bash
# What depends on the device, on a machine with a CUDA GPU and the three packages installed:
# the tests below take the GPU by themselves (device="auto").
set -euo pipefail
cd "$(dirname "$0")/.."
python3 - <<'PY'
import sys, torch, transformers
assert torch.cuda.is_available(), "no CUDA device"
print("python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name())
PY
exec python3 -m pytest -q -n "${WORKERS:-6}" --dist loadgroup -m "not model" \
    kernels/tests core/tests/models core/tests/sampling core/tests/engine core/tests/api core/tests/params \
    tests/test_contract_scenarios.py tests/test_lossless.py tests/test_faulty_proposers.py \
    tests/test_law_weighing_rules.py "$@"
