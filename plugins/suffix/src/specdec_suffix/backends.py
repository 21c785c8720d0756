"""Whose suffix trees are used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

from specdecode.contract import Unsupported

from .cache import Cache

logger = logging.getLogger(__name__)

_PACKAGE = "arctic_inference"


def check_backend(backend: str) -> None:
    """Raises Unsupported if ``backend`` needs a package that is not there; imports nothing."""
    if backend == "arctic" and find_spec(_PACKAGE) is None:
        raise Unsupported(
            "speculative_config.backend='arctic' wants arctic-inference, which is not installed: "
            "pip install 'specdec-suffix[arctic]', or use backend='python'"
        )


def cache_class(backend: str) -> Callable[[int, bool], Cache]:
    """The cache of a backend; with ``auto`` arctic-inference's if it is installed and can be imported."""
    from .cache import PythonCache

    if backend == "python" or (backend == "auto" and find_spec(_PACKAGE) is None):
        return PythonCache
    try:
        from .arctic import ArcticCache
    except ImportError as error:
        if backend == "arctic":
            raise Unsupported(
                f"speculative_config.backend='arctic': arctic-inference is installed but cannot be imported "
                f"({error}); mend it, or use backend='python'"
            ) from error
        logger.warning(
            "arctic-inference cannot be imported (%s): the trees in Python are used instead", error
        )
        return PythonCache
    return ArcticCache
