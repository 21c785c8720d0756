"""The conformance kit on each method: on the host, on the device, under a rule that weighs laws, nested."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from specdec_eagle.testing import write_head
from specdecode.testing import scripted
from specdecode.testing.conformance import Case, parametrize_with_checks

scripted.install()

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SELF_DRAFT = {"method": "scripted-self-draft", "num_speculative_tokens": 3, "layers": 1}


def with_eagle(*before, after=(), **keys):
    """Keys of a combination of which one child is a head for the kit's target."""

    def config(toy):
        path = write_head(Path(toy.path).parent / "combined", "eagle", toy.path)
        head = {"method": "eagle", "model": str(path), "num_speculative_tokens": 4}
        return {"proposers": [*before, head, *after], **keys}

    return config


CASES = [
    Case(method="cascade", config=with_eagle(NGRAM, min_score=0.5)),
    Case(method="cascade", config=with_eagle(SELF_DRAFT)),  # on the device, for graphs
    Case(method="cascade", config=with_eagle(SELF_DRAFT, rejection_sample_method="standard")),
    Case(method="extend", config=with_eagle(after=(NGRAM,))),
    # So long a trial that nothing is chosen anew: which method drafts would be learnt from the steps before.
    Case(method="auto", config=with_eagle(after=(NGRAM,), trial_steps=100_000)),
]
if find_spec("specdec_suffix"):
    # What it remembers of other requests the reference of state has not seen.
    SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    CASES.append(Case(method="extend", config=with_eagle(after=(SUFFIX,))))


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
