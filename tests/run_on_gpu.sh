#!/usr/bin/env bash
# What depends on the device, on a machine with a CUDA GPU and the three packages importable. In stages, each
# with a time of its own, so that one fits into a session of a few minutes:
#
#     tests/run_on_gpu.sh [STAGE...]      # kernels plugins engine lossless exact sanitizer; all, in turn, if none
#
#   kernels    every kernel against its torch reference, float32 and bfloat16, rows invariant to the bit
#   plugins    the draft methods on the device, and the conformance kit's part for it
#   engine     the engine's own tests; they take the GPU by themselves (device="auto")
#   lossless   float32: the tokens of each request alone, with every proposer, with graphs and without
#   exact      the same in bfloat16
#   sanitizer  the kernels' tests under compute-sanitizer (TOOL=memcheck, racecheck, synccheck or initcheck)
#
# Failures are told as they happen, so that a stage which is out of time has told its own.
# BUDGET seconds a stage (280; the sanitizer takes 150 at most), WORKERS processes (12; Triton compiles in each, and
# shares what it compiled through its cache), PYTEST_ARGS for pytest. Ends with the number of stages that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
BUDGET=${BUDGET:-280} WORKERS=${WORKERS:-12} TOOL=${TOOL:-memcheck}
read -ra MORE <<<"${PYTEST_ARGS:-}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1

python3 - <<'PY' || exit 1
import sys, torch, transformers, triton
assert torch.cuda.is_available(), "no CUDA device"
print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__, end=" ")
print("transformers", transformers.__version__, "on", torch.cuda.get_device_name())
PY

within() { timeout -k 10 "$BUDGET" "$@"; }
tests() {
  within python3 -m pytest -q --tb=short -n "$WORKERS" --dist worksteal -p no:cacheprovider -p no:benchmark \
    -p tests.instant_failures "$@" ${MORE[@]+"${MORE[@]}"}
}

kernels() { tests -m "not sweep" kernels/tests; }
plugins() {
  tests plugins/*/tests/*_gpu.py examples/*/tests/*_gpu.py tests/conformance/test_conformance_gpu.py \
    core/tests/lora/test_lora_gpu.py
}
engine() {
  tests -m "not model" core/tests/models core/tests/sampling core/tests/engine core/tests/api core/tests/params \
    core/tests/verify tests/test_contract_scenarios.py tests/test_lossless.py tests/test_faulty_proposers.py \
    tests/test_law_weighing_rules.py tests/test_gpu_weight_updates.py plugins/ngram/tests/test_ngram_device.py \
    tests/images/test_images_gpu.py
}
lossless() { tests tests/test_gpu_exact.py tests/test_gpu_exact_bits.py -k "not bfloat16"; }
exact() { tests tests/test_gpu_exact.py tests/test_gpu_exact_bits.py -k bfloat16; }

# Without torch's own pool every tensor ends where its allocation does, so that a read beyond it is seen; so nothing
# can be captured. SANITIZE chooses tests by name: by default those that neither capture nor look for equal bits, of
# shapes that are small and of which most are no multiple of a tile. They run once without the tool, which would
# slow down what Triton compiles, then under it in several processes: a file each, of the longest a part each.
sanitizer() {
  local logs failed=0 file name part began=$SECONDS all=$((BUDGET < 150 ? BUDGET : 150)) jobs=() names=() parts=()
  local chosen="${SANITIZE:-not bits and not graph and not captured and not 4096 and not 1024 and not 576 and not large and not compiles}"
  logs=$(mktemp -d)
  local BUDGET=$((all / 2))
  WORKERS=16 tests -m "not sweep" -k "$chosen" kernels/tests/test_gpu_*.py || failed=1
  for file in kernels/tests/test_gpu_*.py; do
    name=$(basename "$file" .py)
    case $name in
      *compiles | *ranks) continue ;; # the tool has one kernel run at a time, and those of ranks wait for each other
      test_gpu_projection) parts=(queries gates additions every_kind "not queries and not gates and not additions and not every_kind") ;;
      test_gpu_attention) parts=(windows "not windows") ;;
      *) parts=(test) ;;
    esac
    for part in "${parts[@]}"; do
      BUDGET=$((all - SECONDS + began))
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 within compute-sanitizer --tool "$TOOL" --target-processes all \
        --error-exitcode 86 --print-limit 20 python3 -m pytest -q -x -p no:cacheprovider "$file" \
        -m "not sweep" -k "($chosen) and ($part)" ${MORE[@]+"${MORE[@]}"} >"$logs/${#jobs[@]}" 2>&1 &
      jobs+=($!) names+=("$name, $part")
    done
  done
  for i in "${!jobs[@]}"; do
    wait "${jobs[$i]}"; local status=$?
    echo "-- $TOOL ${names[$i]}: $([ $status = 0 ] && echo clean || echo "status $status (86: errors, 124: out of time)")"
    grep -E "ERROR SUMMARY|passed|failed" "$logs/$i" | tail -2
    [ $status = 0 ] || { failed=1; grep -E "=========|Error" "$logs/$i" | head -40; }
  done
  rm -rf "$logs"
  return $failed
}

[ $# -gt 0 ] || set -- kernels plugins engine lossless exact sanitizer
failed=0
for stage in "$@"; do
  case $stage in
    kernels | plugins | engine | lossless | exact | sanitizer) ;;
    *) echo "no stage '$stage': kernels, plugins, engine, lossless, exact, sanitizer" >&2; exit 64 ;;
  esac
done
for stage in "$@"; do
  began=$SECONDS
  if "$stage"; then outcome=passed; else outcome="FAILED (status $?)"; failed=$((failed + 1)); fi
  echo "== $stage: $outcome, $((SECONDS - began)) s"
done
exit $failed
