#!/usr/bin/env bash
# Trains drafter-smollm2 again, from its seed: train.sh MODEL PROMPTS.jsonl OUT [MORE OPTIONS]
# MODEL: SmolLM2-135M-Instruct. PROMPTS.jsonl: python heads/smollm2/make_prompts.py PROMPTS.jsonl, in specdec's repository.
set -euo pipefail
model=$1 prompts=$2 out=$3
shift 3
exec specdecode train parallel --model "$model" --data "$prompts" --out "$out" --seed 0 \
    --data-tokens 20000 --prompt-tokens 192 --answer-tokens 128 --temperatures 0 --held-out 16 --batch-size 32 \
    --loss-vocab-size 2048 --steps 240 --row-tokens 256 --batch-rows 4 --learning-rate 0.002 --evaluate-every 60 \
    --gate-prompts 4 --gate-tokens 64 --no-conform --force "$@"
