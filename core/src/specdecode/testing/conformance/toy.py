"""The model that the kit speculates for, and what it says without speculation."""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ...contract import TargetInfo
from .asks import Ask, asks

if TYPE_CHECKING:
    from .driving import Rig


@functools.cache
def toy_target() -> Path:
    """A 2-layer checkpoint with random weights and a byte vocabulary, kept until the process ends."""
    from ..tiny import tiny_checkpoint

    # Outputs so small that the next token follows from the last one now and then, as untrained heads guess.
    return tiny_checkpoint(_kept_folder() / "target", output_scale=0.5, max_position_embeddings=256)


@functools.cache
def law_toy(device: str = "cpu") -> Toy:
    """One whose law behind each token is known: :mod:`specdecode.testing.offset_laws`."""
    from ..offset_laws import law_target

    return Toy(law_target(_kept_folder() / "target"), device)


def _kept_folder() -> Path:
    """Until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="specdecode-conformance-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


class Toy:
    """A target, and its own outputs."""

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self.device = device
        self._outputs: dict[Any, list[int]] = {}
        self._changed: dict[Any, list[int]] = {}  # by the changed weights

    @functools.cached_property
    def _plain(self) -> Rig:
        """An engine without speculation."""
        from .driving import Rig

        return Rig.plain(self)

    @property
    def info(self) -> TargetInfo:
        """The target as the engines of the kit describe it."""
        return self._plain.engine.target

    @property
    def model(self) -> Any:
        """Its model, loaded."""
        return self._plain.engine.core.runner.model

    @functools.cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a request."""
        from ...models import eos_token_ids, resolve_model

        return tuple(sorted(eos_token_ids(resolve_model(str(self.path)))))

    @functools.cached_property
    def asks(self) -> list[Ask]:
        """The requests that the kit makes of it."""
        return asks(self.info.vocab_size)

    @functools.cached_property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """Prompt and output of each request of the kit, for a proposer that knows the answers.

        The outputs go on behind a stop.
        """
        endless = [attrs.evolve(ask, params=ask.params.clone(ignore_eos=True)) for ask in self.asks]
        outputs = self.outputs(endless)
        return tuple((*ask.prompt, *outputs[ask.key]) for ask in endless)

    def outputs(self, wanted: Sequence[Ask]) -> dict[str, list[int]]:
        """Key -> output ids without speculation."""
        missing = [ask for ask in wanted if _content(ask) not in self._outputs]
        if missing:
            found = self._plain.generate(missing)
            self._outputs |= {_content(ask): found[ask.key] for ask in missing}
        return {ask.key: self._outputs[_content(ask)] for ask in wanted}

    @functools.cached_property
    def changed_weights(self) -> dict[str, Any]:
        """All weights of the target, each a little larger or smaller."""
        import torch

        from ...models import load_weights

        noise = torch.Generator().manual_seed(0)
        return {
            name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
            for name, tensor in load_weights(self.path)
        }

    def outputs_changed(self, wanted: Sequence[Ask]) -> dict[str, list[int]]:
        """Key -> output ids of a target with :attr:`changed_weights`, without speculation."""
        from .driving import Rig

        missing = [ask for ask in wanted if _content(ask) not in self._changed]
        if missing:
            with Rig.plain(self) as rig:
                rig.update_weights(self.changed_weights)
                found = rig.generate(missing)
            self._changed |= {_content(ask): found[ask.key] for ask in missing}
        return {ask.key: self._changed[_content(ask)] for ask in wanted}


def _content(ask: Ask) -> Any:
    """What an output depends on."""
    return ask.prompt, repr(ask.params)


@functools.cache
def toy(path: Path | None = None, device: str = "cpu") -> Toy:
    """The toy around a checkpoint; None: :func:`toy_target`."""
    return Toy(path or toy_target(), device)
