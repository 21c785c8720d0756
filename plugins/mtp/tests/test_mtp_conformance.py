"""The conformance kit: one module applied again and again, several, and layers of transformers' kind."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path

from specdec_mtp.testing import write_target
from specdecode.testing.conformance import Case, parametrize_with_checks


@functools.cache
def target(layout="mimo", modules=1):
    folder = tempfile.TemporaryDirectory(prefix="specdec-mtp-")
    atexit.register(folder.cleanup)
    return write_target(Path(folder.name) / "target", layout, modules=modules, output_scale=0.4)


FOUR = {"num_speculative_tokens": 4}
CASES = [
    Case(method="mtp", config=FOUR, target=target),
    Case(method="mtp", config=FOUR, target=functools.partial(target, modules=3)),
    Case(
        method="mtp",
        config={**FOUR, "rejection_sample_method": "standard"},
        target=functools.partial(target, modules=2),
    ),
    Case(method="mtp", config=FOUR, target=functools.partial(target, "glm4_moe", modules=2)),
]


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
