"""What the overlapped loop takes beside the plain one's parts: seats, and the step over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..contract import Needs, Place, Shape, TargetInfo, Tokens
from ..models import Capturable
from ..runner.graphs import Graphs
from ..runner.profiling import can_be_captured
from ..runner.runner import ModelRunner, checks_writes
from ..runner.seats import Seats, SeatShape
from ..runner.steady import SteadyStep
from ..verify import Rule
from .args import EngineArgs


def overlaps(args: EngineArgs, device: torch.device) -> bool:
    """Whether the host is to run ahead of the device: as a rule where the device is another one."""
    return device.type == "cuda" if args.async_scheduling is None else args.async_scheduling


def max_slots(args: EngineArgs, info: TargetInfo, needs: Needs | None) -> int:
    """A bound of any row's slots: tokens, drafts, scratch, and a block that nobody is given."""
    slots = info.max_model_len + 1 + (needs.width + needs.reserve if needs else 0)
    return (-(-slots // args.block_size) + 1) * args.block_size


def may_capture(args: EngineArgs, device: torch.device) -> bool:
    """Whether steps are captured if the model's can be: not beside what looks at their tensors."""
    looks = checks_writes() or args.attention_backend == "flashinfer"
    return device.type == "cuda" and overlaps(args, device) and not looks and not args.enforce_eager


def captures(args: EngineArgs, runner: ModelRunner, needs: Needs | None) -> bool:
    """Whether steps are captured: a model of which it is not known is tried, in small steps and wide ones."""
    if not may_capture(args, runner.device):
        return False
    if runner.model.capturable is Capturable.ALWAYS:
        return True
    points = {(args.max_num_seqs, 1), (1, 1 + (needs.width if needs else 0)), (1, 1)}
    return can_be_captured(runner, sorted(points, reverse=True))


def make_steady(
    args: EngineArgs,
    runner: ModelRunner,
    info: TargetInfo,
    needs: Needs | None,
    rule: Rule,
    *,
    captured: bool,
    widths: Sequence[int] = (),
    most_tokens: int | None = None,
) -> SteadyStep:
    """The step over seats for ``max_num_seqs`` rows, to be ``captured`` or not; see :class:`SteadyStep`."""
    width = needs.width if needs else 0
    seats = Seats(
        SeatShape(
            rows=args.max_num_seqs,
            width=width,
            depth=needs.depth if needs else 0,
            tree=needs is not None and needs.shape is Shape.TREE,
            columns=max_slots(args, info, needs) // args.block_size,
            block_size=args.block_size,
            vocab_size=info.vocab_size,
            history=info.max_model_len + width + 1 if reads_history(needs) else 0,
        ),
        runner.device,
    )
    graphs = Graphs(runner.device, enabled=captured)
    rates = None if rule.synthetic is None else torch.tensor(rule.synthetic.rates, device=runner.device)
    return SteadyStep(runner, seats, graphs, rates=rates, widths=widths, most_tokens=most_tokens)


def reads_history(needs: Needs | None) -> bool:
    """Whether a proposer reads whole texts on the device."""
    return needs is not None and needs.place is Place.DEVICE and needs.tokens is Tokens.HISTORY
