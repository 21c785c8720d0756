"""Whether a model's step can be captured in a CUDA graph."""

from __future__ import annotations

import enum


class Capturable(enum.Enum):
    """What is known of it before any step was run."""

    ALWAYS = "always"  #: its code is ours: static in shape, and no tensor's value is read on the host
    #: its code is another's: what reads a value raises when it is tried, and what reads none runs the same
    #: kernels whatever the values, so that a capture of it is sound
    TRIED = "tried"
