"""Acceptance of drafts from past answers, without a model: each recorded answer is drafted from all others.

``record`` of ``plugins/suffix/benchmarks/replay.py`` writes the texts::

    python plugins/suffix/benchmarks/replay.py record --model MODEL --out texts.json
    python examples/proposer-retrieval/benchmarks/leave_one_out.py texts.json
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specdecode.contract import Needs, Proposer, Shape, Tokens
from specdecode.testing.dry import DryEngine, Recorded

from specdec_retrieval.config import RetrievalConfig
from specdec_retrieval.datastore import build
from specdec_retrieval.drafting import most_frequent
from specdec_retrieval.proposer import RetrievalProposer
from specdec_retrieval.suffix_array import SuffixArray

Ids = Sequence[int]


def folds(texts: Sequence[Recorded]) -> Iterator[tuple[Recorded, list[Ids]]]:
    """Each text, and the answers of all others."""
    for index, text in enumerate(texts):
        yield text, [other.answer for number, other in enumerate(texts) if number != index]


def row(texts: Sequence[Recorded], name: str, make: Callable[[list[Ids]], Proposer], needs: Needs) -> None:
    """One line of the table."""
    results = [DryEngine(make(past), needs, vocab_size=1 << 20).replay([text]) for text, past in folds(texts)]
    tokens, steps, drafts, drafted, accepted = (
        sum(getattr(result, count) for result in results)
        for count in ("tokens", "verifications", "drafts", "drafted", "accepted")
    )
    print(
        f"| {name} | {tokens / steps:.2f} | {1 + accepted / drafts:.2f} | {accepted / drafted:.2f} "
        f"| {1 + drafted / steps:.2f} |"
    )


def table(texts: Sequence[Recorded], length: int) -> None:
    print(
        "| method | tokens a step | acceptance length | rate | rows a step |\n| --- | --- | --- | --- | --- |"
    )
    try:
        from specdec_ngram.config import NgramConfig
        from specdec_ngram.proposer import NgramProposer
    except ImportError:
        print("| ngram: not installed | | | | |")
    else:
        ngram = NgramConfig(num_speculative_tokens=length)
        needs = Needs(width=length, depth=length, tokens=Tokens.HISTORY)
        row(texts, f"ngram, {length}", lambda past: NgramProposer(ngram), needs)
    for name, keys in settings():
        config = RetrievalConfig(datastore="", num_speculative_tokens=length, **keys)
        shape = Shape.TREE if config.retrieval_tree else Shape.CHAIN
        needs = Needs(width=length, depth=length, tokens=Tokens.HISTORY, shape=shape)

        def make(past: list[Ids], config: RetrievalConfig = config) -> Proposer:
            return RetrievalProposer(config, build(past, None))

        row(texts, f"retrieval, {length}{name}", make, needs)


def settings() -> Iterator[tuple[str, dict[str, float]]]:
    yield "", {}
    for least in (0.0, 0.1, 0.4):
        yield f", score {least}", {"retrieval_min_score": least}
    for shortest in (1, 3):
        yield f", match {shortest} or more", {"retrieval_match_min": shortest}
    for longest in (8, 32):
        yield f", match {longest} at most", {"retrieval_match_max": longest}
    yield ", tree", {"retrieval_tree": True}
    yield ", tree, score 0.1", {"retrieval_tree": True, "retrieval_min_score": 0.1}


def chances(texts: Sequence[Recorded], longest: int = 16) -> None:
    """How often the most frequent next token came, beside the share of matches that had promised it."""
    found: dict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for text, past in folds(texts):
        store = build(past, None)
        index, whole = SuffixArray(store.text, store.order), [*text.prompt, *text.answer]
        for at in range(len(text.prompt) + 1, len(whole)):
            match = index.longest(whole[max(0, at - longest) : at], 1)
            if match is None:
                continue
            rows = index.continuations(match, 1, 256)
            draft = most_frequent(rows, 1.0, most=1, least_score=0.0, tree=False)
            if draft.token_ids:
                counts = found[match.length]
                counts[0] += 1
                counts[1] += draft.token_ids[0] == whole[at]
                counts[2] += draft.scores[0]
    print("\n| matching tokens | places | came | promised | chance |\n| --- | --- | --- | --- | --- |")
    for length, (places, came, promised) in sorted(found.items()):
        print(
            f"| {length} | {places} | {came / places:.2f} | {promised / places:.2f} | {came / promised:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("--length", type=int, default=10, help="draft tokens a step")
    arguments = parser.parse_args()
    texts = [
        Recorded(prompt=entry["prompt"], answer=entry["output"])
        for entry in json.loads(arguments.texts.read_text())
    ]
    table(texts, arguments.length)
    chances(texts)


if __name__ == "__main__":
    main()
