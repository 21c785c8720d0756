"""The synthetic rule: drafts are accepted by a rate for each place in the chain, whatever their tokens.

For benchmarks: it times a method at an acceptance that its weights, random ones perhaps, do not have. The
output is text of nobody's, so that all that is measured under it is marked as such.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from specdec_kernels.noise import uniform

from ..contract import ConfigError
from ..sampling.streams import Stream
from .base import Verdict


@attrs.frozen
class Synthetic:
    """``rates[i]``: the chance that draft ``i`` of a chain is accepted, given that those before it were."""

    rates: tuple[float, ...]

    @classmethod
    def of(cls, depth: int, rates: Sequence[float] | None, length: float | None) -> Synthetic:
        """For chains of ``depth`` drafts, by one of the two.

        Args:
            rates: for each draft the chance that it and all before it are accepted: none larger than the
                one before.
            length: mean tokens a verification, the target's own counted, 1 to ``depth + 1``. It becomes the
                least varied rates: 3.4 of 4 drafts are 1, 1, 0.4, 0.

        Raises:
            ConfigError: they do not fit ``depth``.
        """
        if rates is None:
            assert length is not None
            if not 1 <= length <= depth + 1:
                raise ConfigError(
                    f"speculative_config.synthetic_acceptance_length must be 1 to {depth + 1} with {depth} "
                    f"drafts a step, got {length!r}"
                )
            rates = [min(max(length - 1 - place, 0.0), 1.0) for place in range(depth)]
        elif len(rates) != depth:
            raise ConfigError(
                f"speculative_config.synthetic_acceptance_rates must have {depth} numbers, one for each "
                f"draft of a step, got {len(rates)}"
            )
        before = [1.0, *rates]
        return cls(tuple(rate / above if above else 0.0 for above, rate in zip(before, rates, strict=False)))

    def accepted(self, seeds: Sequence[int], positions: Sequence[int], lens: Sequence[int]) -> list[int]:
        """How many drafts each of ``B`` rows gets accepted.

        A function of the rows' seeds and positions alone, on the host as on the device
        (:func:`specdec_kernels.verification.accept`), so that a benchmark repeats.

        Args:
            seeds: any 64 bits.
            positions: of the first draft of each row.
            lens: drafts of each row.
        """
        depth = len(self.rates)
        seed = torch.tensor(seeds, dtype=torch.int64).repeat_interleave(depth)
        position = (torch.tensor(positions, dtype=torch.int64)[:, None] + torch.arange(depth)).flatten()
        nothing = torch.zeros_like(seed)
        chances = uniform(seed, nothing, position, nothing[:, None], stream=Stream.ACCEPT)
        accepts = chances.view(-1, depth) < torch.tensor(self.rates)
        accepts &= torch.arange(depth) < torch.tensor(lens)[:, None]
        counts: list[int] = accepts.long().cumprod(dim=1).sum(dim=1).tolist()
        return counts


def take(targets: Sequence[int], ids: Sequence[int], count: int) -> Verdict:
    """The verdict on a chain of which ``count`` drafts are accepted.

    Args:
        targets: the target's token at the root, then after each draft.
        ids: the token of each draft.
    """
    return Verdict(tuple(range(count)), (*(int(token) for token in ids[:count]), int(targets[count])))
