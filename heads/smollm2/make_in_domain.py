"""Writes prompts of the kind that heads are trained on, of another seed: chat whose user the target plays.

    python heads/smollm2/make_in_domain.py MODEL benchmarks/data/in_domain.jsonl

MODEL: SmolLM2-135M-Instruct, a directory or the .gguf file. Each line is a prompt for ``benchmarks/heads.py``
(``--dataset``). Texts depend on the model, the seed and, in the last bit of a logit, on the machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specdec_train.prompts import write_user_turns
from specdecode import LLM

#: Not one that ``specdecode train`` was run with here; texts of equal seeds are equal.
SEED = 90_001_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with LLM(options.model, dtype=options.dtype, max_model_len=1024) as llm:
        # More than are wanted: some do not end, and some are there already.
        turns = write_user_turns(llm, 2 * options.count, SEED, max_tokens=160, batch_size=16)
    source = "written by SmolLM2-135M-Instruct, Apache-2.0"
    lines = [
        {"task": "in-domain chat", "id": f"in-domain-{index}", "prompt": turn[0]["content"], "source": source}
        for index, turn in enumerate(turns[: options.count])
    ]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    print(f"{len(lines)} prompts in {options.out}")


if __name__ == "__main__":
    main()
