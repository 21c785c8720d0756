"""What a draft method contributes to its training: a :class:`Recipe`, yielded by its plugin's hook.

::

    @hookimpl
    def specdecode_recipes():
        from .recipe import FooRecipe  # specdec-train is imported here only, where it is there
        yield FooRecipe()

The trainer makes the data (prompts, the target's answers, its hidden states), batches, optimises, evaluates,
resumes, writes files and judges the result; a recipe knows its module, its loss and its checkpoint's layout.

Notation: ``B`` rows of a batch, ``T`` tokens of a row, ``H`` the target's hidden size, ``V`` its vocabulary.
Helpers for recipes: :mod:`specdec_train.blocks` (norm, rope, attention, MLP, a decoder layer, all trainable),
:mod:`specdec_train.losses` (soft cross entropy over large vocabularies), :mod:`specdec_train.vocabulary`
(which tokens a reduced vocabulary keeps), :mod:`specdec_train.distilled` and :mod:`specdec_train.unrolled`
(a drafter's passes and their losses).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import attrs

if TYPE_CHECKING:
    import torch
    from specdecode.contract import TargetInfo

#: As in :class:`specdecode.contract.Tap`: 0..L, the stream that enters block ``i`` (``L``: before the final
#: norm), or ``"final"``, after the final norm.
Boundary = int | Literal["final"]


@attrs.frozen(kw_only=True, eq=False)
class TrainingTarget:
    """The frozen target as a recipe may use it. Its tensors are no parameters of what is trained."""

    info: TargetInfo
    device: torch.device
    dtype: torch.dtype  #: of ``embed``, ``lm_head`` and of a batch's features
    embed: torch.Tensor  #: ``[V, H]``
    lm_head: torch.Tensor  #: ``[V, H]``; the same tensor as ``embed`` where they are tied
    norm: torch.Tensor  #: ``[H]`` float32, weight of the final norm
    rms_norm_eps: float
    counts: torch.Tensor  #: ``[V]`` int64 on the CPU: how often each token stands in the training answers
    #: Iterator of ``(name, tensor)`` over the target's whole checkpoint, on the CPU, by its stored names.
    load_weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]

    def logits(self, final: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., H]`` after the final norm -> ``[..., V]`` in ``dtype``, or ``[..., len(ids)]``."""
        head = self.lm_head if ids is None else self.lm_head[ids]
        return final.to(head.dtype) @ head.T


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Texts of the target, packed: a row holds one document behind the other, all on the target's device.

    ``features[boundary][b, t]`` is the target's hidden state *at* token ``t``. A drafter that drafts behind
    token ``t`` (the last committed one) knows the tokens up to ``t`` and the states up to ``t - 1``.
    """

    ids: torch.Tensor  #: ``[B, T]`` int64
    answer: torch.Tensor  #: ``[B, T]`` bool: the target wrote this token, so that a drafter should foresee it
    documents: torch.Tensor  #: ``[B, T]`` int64, the document of each token, within its row; -1: padding
    positions: torch.Tensor  #: ``[B, T]`` int64, of the token in its text
    features: Mapping[Boundary, torch.Tensor]  #: ``[B, T, H]`` each, in the target's dtype

    def later(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """``[B, T, ...]``: of each token the value ``count`` tokens on (back, if negative); 0 where none is.

        Whether the token there belongs to the same document is :meth:`wanted`'s and :meth:`same`'s to say.
        """
        moved = values.roll(-count, 1)
        if count > 0:
            moved[:, -count:] = 0
        elif count < 0:
            moved[:, :-count] = 0
        return moved

    def same(self, count: int) -> torch.Tensor:
        """``[B, T]`` bool: the token ``count`` on (back, if negative) is there, and of the same document."""
        other = self.later(self.documents + 1, count)
        return (other == self.documents + 1) & (self.documents >= 0)

    def wanted(self, count: int) -> torch.Tensor:
        """``[B, T]`` bool: the token ``count`` on is of the same document, and one of the target's answer."""
        return self.same(count) & self.later(self.answer, count)


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """A trained module in its public layout; the trainer writes the files.

    Floating tensors are stored in the dtype asked for (bfloat16 as a rule), others (``d2t``, ``t2d``) as they
    are.
    """

    config: Mapping[str, Any]  #: ``config.json``
    tensors: Mapping[str, torch.Tensor]  #: by their stored names
    copied: tuple[str, ...] = ()  #: files to copy from the target's directory, those of them that are there
    facts: Mapping[str, Any] = attrs.field(factory=dict)  #: what else ``training.json`` should say, as JSON


class Trainee(Protocol):
    """What is trained: a ``torch.nn.Module`` with these methods.

    It is called under autocast (bfloat16 products, float32 weights) unless the target computes in float32.
    Shapes are static, there is no loop over rows, and nothing waits for the device (no ``.item()``, no
    boolean indexing).
    """

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """A scalar to minimise, a mean over the tokens that count, and scalars for the log (detached)."""

    def drafts(self, batch: Batch, depth: int) -> torch.Tensor:
        """Held-out drafts, ``[B, T, depth]`` int64, in the target's ids.

        ``drafts[b, t, d]`` is the guess of token ``t + 1 + d`` of a draft that starts behind token ``t``,
        provided that the drafts before it were right: so it may read tokens up to ``t + d`` and the target's
        states up to ``t - 1``; all else is the drafter's own, recursively, just as the plugin drafts. Greedy.
        """

    def checkpoint(self) -> Checkpoint:
        """The weights as they are now, in the layout that the plugin loads."""


class Recipe(abc.ABC):
    """How a method is trained. Making one costs nothing: torch is imported in :meth:`build`."""

    #: The method, as in ``speculative_config``.
    name: ClassVar[str]
    #: A line of help.
    summary: ClassVar[str]
    #: Frozen attrs class of fields made by :func:`specdecode.contract.option`, each with a default. They
    #: become options of the command: ``num_layers`` is ``--num-layers``; int, float, bool, str, ``X | None``.
    options: ClassVar[type]
    #: Peak of AdamW's learning rate, unless the command says otherwise.
    learning_rate: ClassVar[float] = 1e-3
    #: Levels of a draft that are evaluated, and drafted in the gate.
    depth: ClassVar[int] = 5

    @abc.abstractmethod
    def taps(self, options: Any, target: TargetInfo) -> tuple[Boundary, ...]:
        """The target's states that :class:`Batch` must hold, ``"final"`` for its logits among them.

        Raises:
            ConfigError: an option that does not fit the target.
        """

    @abc.abstractmethod
    def build(self, options: Any, target: TrainingTarget) -> Trainee:
        """The module, float32, on the target's device, with initial weights from torch's seeded generator.

        Raises:
            ConfigError: an option that does not fit the target.
        """

    def speculative_config(self, options: Any, path: Path) -> dict[str, Any]:
        """How the gate runs the published checkpoint through the plugin."""
        return {"method": self.name, "model": str(path), "num_speculative_tokens": self.depth}
