"""Logits processors: a user's callables between the target's logits and the draw. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specdecode.contract import SpecdecodeError

if TYPE_CHECKING:
    import torch

Processor = Callable[..., Any]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ProcessorFault(SpecdecodeError):
    """A processor raised, or gave what is no logits: the end of its request, and of no other."""


def takes_prompt(processor: Any) -> bool:
    """Whether it is called ``(prompt_ids, output_ids, logits)``, and not ``(output_ids, logits)``.

    What counts are the positional parameters without a default.

    Raises:
        TypeError: ``processor`` can be called neither way.
    """
    if not callable(processor):
        raise TypeError(f"must be callable, got {processor!r}")
    try:
        parameters = inspect.signature(processor).parameters.values()
    except ValueError:  # some builtins do not tell
        return False
    kinds = [parameter.kind for parameter in parameters]
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    needed = sum(parameter.default is inspect.Parameter.empty for parameter in positional)
    most = len(positional) if inspect.Parameter.VAR_POSITIONAL not in kinds else 3
    if needed > 3 or most < 2:
        raise TypeError(
            f"must take (output_ids, logits) or (prompt_ids, output_ids, logits), got {processor!r} "
            f"with {needed} parameters"
        )
    return needed == 3


class LogitsProcessors:
    """The processors of one completion.

    One that has a method ``clone`` is cloned, so that each completion has a state of its own.
    """

    def __init__(self, processors: Sequence[Processor], prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = list(prompt_ids)
        own = [processor.clone() if hasattr(processor, "clone") else processor for processor in processors]
        self._calls = [(processor, takes_prompt(processor)) for processor in own]

    def __call__(self, output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Run them one after the other.

        Args:
            output_ids: the output before the token to draw; each processor gets a list of its own.
            logits: ``[V]`` float32; a processor may change its copy in place.

        Returns:
            ``[V]`` float32.

        Raises:
            ProcessorFault: one of them raised, or gave something else than ``[V]`` numbers.
        """
        for processor, with_prompt in self._calls:
            ids = (self._prompt_ids, list(output_ids)) if with_prompt else (list(output_ids),)
            try:
                result = processor(*ids, logits.clone())
            except Exception as error:
                raise ProcessorFault(
                    f"logits processor {_name(processor)} raised {type(error).__name__}: {error}"
                ) from error
            logits = _checked(result, logits, processor)
        return logits


def _checked(result: Any, like: torch.Tensor, processor: Processor) -> torch.Tensor:
    shape = getattr(result, "shape", None)
    if shape != like.shape:
        got = type(result).__name__ if shape is None else f"shape {list(shape)}"
        raise ProcessorFault(
            f"logits processor {_name(processor)} must return logits of shape {list(like.shape)}, got {got}"
        )
    try:
        checked: torch.Tensor = like.new_empty(like.shape).copy_(result)
    except (TypeError, RuntimeError) as error:
        raise ProcessorFault(
            f"logits processor {_name(processor)} must return a tensor of logits, got "
            f"{type(result).__name__}: {error}"
        ) from error
    if checked.isnan().any():
        raise ProcessorFault(f"logits processor {_name(processor)} returned NaN")
    return checked


def _name(processor: Processor) -> str:
    return getattr(processor, "__qualname__", None) or type(processor).__qualname__
