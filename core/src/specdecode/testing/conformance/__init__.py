"""The conformance kit: every promise of the Proposer contract, tried on one method.

Three doors, one list of checks::

    report = check_proposer("ngram", {"num_speculative_tokens": 4})

    @parametrize_with_checks([("ngram", {"num_speculative_tokens": 4})])
    def test_conformance(check):
        check()

    $ specdecode plugins conform ngram

See ``docs/conformance.md``.
"""

from .checks import Broken, Check, Group, NotApplicable, Note, all_checks
from .pytest_door import parametrize_with_checks
from .report import Header, Outcome, Report, Result
from .running import check_proposer
from .subject import Case, Scene, Subject
from .toy import Toy, toy, toy_target

__all__ = [
    "Broken",
    "Case",
    "Check",
    "Group",
    "Header",
    "NotApplicable",
    "Note",
    "Outcome",
    "Report",
    "Result",
    "Scene",
    "Subject",
    "Toy",
    "all_checks",
    "check_proposer",
    "parametrize_with_checks",
    "toy",
    "toy_target",
]
