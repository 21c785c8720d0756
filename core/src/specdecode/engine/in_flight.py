"""A step of the seats that the device was given and the host has not read."""

from __future__ import annotations

import attrs
import torch

from ..contract import Tap
from .request import Request
from .spans import Span


@attrs.frozen(eq=False)
class InFlight:
    """A launched step whose tokens the host has not read."""

    requests: list[Request | None]  #: by seat; None: given up before the launch
    tokens: int  #: verified for each row
    report: torch.Tensor  #: ``[B, T + 3]`` int32 on the host, once ``span.done``
    span: Span  #: of all that was computed for it
    launched: float  #: ``time.perf_counter`` seconds; without a CUDA device it was done then
    fed: bool  #: the draft layers have the entries of what it committed
    rests: bool  #: the proposer was left out, for no draft pays
    size: int  #: rows computed
    width: int  #: drafts that a row might have
    offered: list[int]  #: by seat, of them those that the proposer was let make for that row before
    follows: bool  #: nothing else was computed between the step before and this one
    nodes: torch.Tensor | None  #: ``[B, T]`` int64 like ``report``: where each token was drawn, in trees
    taps: dict[Tap, torch.Tensor]  #: each ``[B * T, hidden]``, until the next launch
