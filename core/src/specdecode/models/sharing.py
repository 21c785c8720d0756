"""Which models can be shared out among ranks, told by their configs."""

from __future__ import annotations

from specdecode.contract import Unsupported

from .families import FAMILIES, decoder_config
from .files import ModelFiles


def check_shareable(files: ModelFiles, ranks: int) -> None:
    """Refuse a model that ``ranks`` cannot share out.

    Raises:
        Unsupported: transformers' code runs it.
        ConfigError: a size of it cannot be divided.
    """
    if ranks == 1:
        return
    if files.architecture not in FAMILIES:
        raise Unsupported(
            f"tensor_parallel_size={ranks} works with the native families ({', '.join(sorted(FAMILIES))}), "
            f"got {files.architecture!r}, which transformers' code runs: set tensor_parallel_size=1"
        )
    decoder_config(files.hf_config, files.architecture).check_ranks(ranks)
