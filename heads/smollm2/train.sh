#!/usr/bin/env bash
# Trains the heads of this distribution on one GPU, from nothing:
#
#     heads/smollm2/train.sh MODEL OUT [HEAD...]     # eagle3 eagle medusa mlp_speculator; all if none is named
#
# MODEL: SmolLM2-135M-Instruct, a directory or the .gguf file. The first head writes answers into OUT/work, which the
# others read; they train side by side. What is published lies in OUT/HEAD/checkpoint: copy it to
# src/specdec_heads_smollm2/HEAD and run make_readme.py. MINUTES of training each (4), DATA_MINUTES of writing (1)
# at most, DATA_TOKENS (3 million) of answers, WRITERS processes (6), MORE for further options of all, as in MORE="--no-conform".
set -euo pipefail
model=${1:?MODEL} out=${2:?OUT}
here=$(cd "$(dirname "$0")" && pwd)
heads=("${@:3}")
[ ${#heads[@]} -gt 0 ] || heads=(eagle3 eagle medusa mlp_speculator)
read -ra more <<<"${MORE:-}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # the processes share the host
mkdir -p "$out"
[ -f "$out/prompts.jsonl" ] || python3 "$here/make_prompts.py" "$out/prompts.jsonl"

own_options() {
  case $1 in
    eagle3) echo "--intermediate-size 2560 --unrolled 5 --decay 0.85 --draft-vocab-size 12288 --no-own-head --fc-norm" ;;
    # A reference for the format: with this target's large output layer it hardly pays.
    eagle) echo "--intermediate-size 768 --unrolled 5 --loss-vocab-size 8192 --force" ;;
    medusa) echo "--num-heads 4 --search-tree 16 --loss-vocab-size 8192 --force" ;;
    mlp_speculator) echo "--n-predict 4 --inner-dim 40 --learning-rate 0.004 --force" ;;
    *) echo "no head $1: eagle3, eagle, medusa, mlp_speculator" >&2; return 64 ;;
  esac
}

train() {
  local options
  read -ra options <<<"$(own_options "$1")"
  specdecode train "$1" --model "$model" --data "$out/prompts.jsonl" --data self --out "$out/$1" --work "$out/work" \
    --data-tokens "${DATA_TOKENS:-3000000}" --data-minutes "${DATA_MINUTES:-1}" --writers "${WRITERS:-6}" --batch-size 128 \
    --fresh-states --prompt-tokens 512 --answer-tokens 384 --temperatures 0,0.7,0,1 --held-out 96 --seed 0 \
    --minutes "${MINUTES:-4}" --licence "Apache-2.0, as the target's" "${options[@]}" "${more[@]}" >"$out/$1.log" 2>&1
}

for head in "${heads[@]}"; do own_options "$head" >/dev/null; done
train "${heads[0]}" &
jobs=($!)
until grep -qs "^training" "$out/${heads[0]}.log"; do
  kill -0 "${jobs[0]}" 2>/dev/null || break  # its log says why
  sleep 1
done
for head in "${heads[@]:1}"; do
  train "$head" &
  jobs+=($!)
done
failed=0
for number in "${!jobs[@]}"; do
  wait "${jobs[$number]}" || failed=$((failed + 1))
  echo "-- ${heads[$number]}"
  tail -3 "$out/${heads[$number]}.log"
done
exit $failed
