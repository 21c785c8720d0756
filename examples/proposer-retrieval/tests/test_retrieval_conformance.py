"""Every promise of the contract, one test each."""

import functools
import json
import tempfile
from pathlib import Path

from specdecode.testing.conformance import parametrize_with_checks

FOLDER = tempfile.TemporaryDirectory(prefix="specdec-retrieval-")  # deleted when the process ends


@functools.cache
def _answers(toy):
    """A file of what the kit's target writes, so that drafts are accepted."""
    file = Path(FOLDER.name) / "answers.jsonl"
    file.write_text("".join(json.dumps({"token_ids": list(text)}) + "\n" for text in toy.texts))
    return str(file)


def chain(toy):
    return {"datastore": _answers(toy), "num_speculative_tokens": 4, "retrieval_match_min": 1}


def tree(toy):
    return {**chain(toy), "num_speculative_tokens": 6, "retrieval_tree": True, "retrieval_min_score": 0.0}


@parametrize_with_checks([("retrieval", chain), ("retrieval", tree)])
def test_conformance(check):
    check()
