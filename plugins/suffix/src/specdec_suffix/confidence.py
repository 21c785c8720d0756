"""How sure a draft is, for those who choose between methods or lengths."""

from __future__ import annotations

from .drafting import Draft


def trust(match_len: int) -> float:
    """How much of a count's probability is left when ``match_len`` tokens stand behind it.

    Measured on outputs of SmolLM2-135M-Instruct: of what counts had promised 0.45 to 0.8 came true behind
    one matching token, 0.9 behind two and three, more behind longer matches (``benchmarks/replay.py``).
    """
    return 1 - 1 / (match_len * match_len + 1)


def confidences(draft: Draft) -> list[float]:
    """For each node the probability that the target comes there.

    Counts alone know no doubt: what followed a token that occurred once has probability 1. So they are
    lowered by how far the match can be trusted, and with each token accepted the match is one longer.
    """
    reach = [1.0]
    levels: list[int] = []
    sure = []
    for parent, prob in zip(draft.parents, draft.probs, strict=True):
        level = 0 if parent < 0 else levels[parent] + 1
        levels.append(level)
        if level + 1 == len(reach):
            reach.append(reach[level] * trust(draft.match_len + level))
        sure.append(prob * reach[level + 1])
    return sure
