"""In-place weight updates: what is decided before anything changes, and what is told behind."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, get_args

import attrs

from ..contract import ConfigError, SpecdecodeError, TargetHandle, TargetUpdate
from ..engine.loop import EngineCore
from ..models import ModelFiles, NewWeights, WeightSource, new_weights

logger = logging.getLogger(__name__)

#: What becomes of requests that the engine has: ``wait`` finishes them first, ``abort`` ends them, ``keep``
#: computes them again, from their tokens, and goes on with the new weights.
UpdateMode = Literal["wait", "abort", "keep"]


class WeightsLostError(SpecdecodeError):
    """Copying new weights failed in the middle, so the engine has neither the old ones nor the new."""


@attrs.frozen(kw_only=True)
class WeightUpdate:
    """What an update did."""

    source: str  #: path or hub id as it was given, or "tensors"
    num_tensors: int
    num_bytes: int  #: as they are stored
    seconds: float  #: that no step was taken


def check_mode(mode: Any) -> None:
    """Raise ConfigError for what is no :data:`UpdateMode`."""
    if mode not in get_args(UpdateMode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(UpdateMode))}, got {mode!r}")


class WeightUpdater:
    """Replaces the weights of one engine's model.

    Args:
        files: what the model was made from.
        target: as the proposer was given it; None without one.
    """

    def __init__(self, core: EngineCore, files: ModelFiles, target: TargetHandle | None) -> None:
        self._core = core
        self._files = files
        self._target = target

    def find(self, source: WeightSource) -> NewWeights:
        """Check ``source``; changes nothing, and may be called while the engine runs.

        Raises:
            ConfigError: it does not fit the model.
        """
        return new_weights(self._core.runner.model, self._files, source)

    def apply(self, new: NewWeights) -> WeightUpdate:
        """Copy ``new``, between two steps; cached KV is dropped, and the proposer is told.

        Raises:
            WeightsLostError: reading failed in the middle; the model is of no use any more.
        """
        started = time.perf_counter()
        self._core.drop_kv()
        try:
            new.copy()
        except Exception as error:
            raise WeightsLostError(
                f"the new weights of {new.source} could not be read to their end ({error}): make a new engine"
            ) from error
        drafting = self._core.drafting
        if drafting is not None and self._target is not None:
            update = TargetUpdate(target=self._target, path=new.path, load_weights=new.load)
            drafting.proposer.on_target_updated(update)
        seconds = time.perf_counter() - started
        logger.info("%d tensors of new weights from %s in %.2f s", new.num_tensors, new.source, seconds)
        return WeightUpdate(
            source=new.source, num_tensors=new.num_tensors, num_bytes=new.num_bytes, seconds=seconds
        )
