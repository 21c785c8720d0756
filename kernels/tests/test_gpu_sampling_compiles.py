"""Sampling, verification, lookup, distillation and trees compile for Hopper with no card near."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

VOCABULARY = 128256


def launch_all(dtype):
    """Each operation once as a captured step calls it, on tensors without memory."""
    from specdec_kernels.distillation import gpu as distillation
    from specdec_kernels.gpu.compiling import meta
    from specdec_kernels.matching import gpu as matching
    from specdec_kernels.noise import gpu as noise
    from specdec_kernels.sampling import gpu as sampling
    from specdec_kernels.trees import Candidates
    from specdec_kernels.trees import gpu as trees
    from specdec_kernels.verification import gpu as verification

    def integers(*shape):
        return meta(*shape, dtype=torch.int64)

    def floats(*shape):
        return meta(*shape, dtype=torch.float32)

    distillation.distill_(meta(8, 12288, dtype=dtype), meta(4, 12288, dtype=dtype), integers(8), floats(8))
    key = {"seed": integers(8), "index": integers(8)}
    filters = {"top_k": integers(8), "top_p": floats(8), "min_p": floats(8)}
    for tokens in (1, 6):
        logits, positions = meta(8 * tokens, VOCABULARY, dtype=dtype), integers(8 * tokens)
        rows = {"temperature": floats(8), "tokens_per_row": tokens, **key}
        sampling.draw_tokens(logits, positions, **rows, **filters)
        sampling.draw_tokens(logits, positions, **rows | {"temperature": None})
        sampling.rank_tokens(logits, positions, k=4, **rows)
        some = {"ids": integers(32000)}
        sampling.draw_tokens(logits[:, :32000], positions, **rows | {"temperature": None}, **some)
        sampling.rank_tokens(logits[:, :32000], positions, k=1, **rows, **filters, **some)
    if dtype == torch.bfloat16:
        return
    for fanout, depth in ((4, 5), (10, 7)):
        candidates = Candidates.empty(8, fanout, depth, integers(8).device)
        level = trees.extend(candidates, None, integers(8, 1, fanout), floats(8, 1, fanout))
        trees.extend(candidates, level, integers(8, fanout, fanout), floats(8, fanout, fanout))
        trees.keep(candidates, integers(8), 16)
    noise.gumbel(*[integers(8)] * 3, VOCABULARY)
    noise.gumbel(*[integers(8)] * 3, integers(8, 3))
    noise.perturb(floats(8, VOCABULARY), *[integers(8)] * 3)
    for own in filters:
        sampling.keep(floats(8, VOCABULARY), None, **{own: filters[own]})
    matching.match_ngrams(
        meta(8, 8192, dtype=torch.int32), integers(8), shortest=2, longest=5, width=5, limits=integers(8)
    )
    for tokens, kind in ((1, "chain"), (6, "chain"), (4, "synthetic"), (33, "tree")):
        width, tree = tokens - 1, kind == "tree"
        grid = integers(8, tokens)
        parents = integers(8, width) if tree else None
        verification.accept(
            *(grid, grid, integers(8), parents, integers(8), integers(8), integers(8)),
            tokens=grid,
            counts=integers(8),
            path=grid,
            history=meta(8, 8192, dtype=torch.int32),
            result=meta(8, tokens + 3, dtype=torch.int32),
            rates=floats(width) if kind == "synthetic" else None,
            seed=integers(8),
        )
        verification.next_inputs(
            *(integers(8), integers(8, width + 1), integers(8), parents, *[integers(8)] * 4, integers(8, 64)),
            block_size=16,
            vocab_size=VOCABULARY,
            depth=5,
            ids=grid,
            lens=integers(8),
            parents=integers(8, width),
            positions=grid,
            write_slots=grid,
            base=grid,
            extra=integers(8, tokens, 5) if tree else None,
            faults=integers(1),
        )
        state = [integers(8)] * 3
        verification.fed_inputs(integers(8), integers(8), grid, *state, width=5, depth=5, tree=tree)
        verification.accepted_moves(*state[:2], grid, integers(8, 64), block_size=16)
        places = [integers(8 * tokens)] * 3, integers(8 * tokens, 5) if tree else None
        verification.draft_places(*places[0], places[1], integers(8), integers(8, 64), block_size=16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_compile(dtype):
    """In a process of its own, as the kernels are interpreted here."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, dtype], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) >= 8
    for kernel in kernels:  # float32 is not what has to be fast
        assert kernel["stack"] <= (32 if dtype == "bfloat16" else 128), kernel
        assert kernel["shared"] <= 100 << 10, kernel


if __name__ == "__main__":
    from specdec_kernels.gpu.compiling import compiling_only

    with compiling_only() as kernels:
        launch_all(getattr(torch, sys.argv[1]))
    for kernel in kernels:
        print(json.dumps(asdict(kernel)))
