"""Whether a proposer reads what its Needs declare, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....contract import Tokens, Undeclared
from ..checks import Broken, Group
from ..comparing import differences

if TYPE_CHECKING:
    from ....contract import Needs
    from ..subject import Subject

GROUP = Group("honesty", order=50)


@GROUP.check("declares-what-it-reads", "reading what ``Needs`` did not declare raises ``Undeclared``")
def declares_what_it_reads(subject: Subject) -> str | None:
    raised = [str(error) for _, error in subject.ordinary.log.raised if isinstance(error, Undeclared)]
    if raised:
        raise Broken(f"{len(raised)} times: {', '.join(dict.fromkeys(raised))}")
    return None


@GROUP.check("undeclared-not-used", "What a proposer is shown: only what its Needs declared")
def undeclared_not_used(subject: Subject) -> str | None:
    """Garbage in all that was not declared, and in buffers as they arrive: the drafts stay the same."""
    from ..probe import Interference

    clean = subject.run(subject.toy.asks)
    poisoned = subject.run(subject.toy.asks, Interference(poison=True))
    compared, found = differences(clean.log.rows, poisoned.log.rows)
    if found:
        raise Broken(f"{len(found)} of {compared} drafts change with what was not declared: {found[0]}")
    return None


@GROUP.check("uses-what-it-declares", "say what must be there")
def uses_what_it_declares(subject: Subject) -> str | None:
    """A declaration costs core work; one that is never made use of is a warning."""
    reads = subject.ordinary.log.reads | subject.stress.log.reads
    unused = [name for name, used in _declarations(subject, subject.needs, reads).items() if not used]
    return f"declares {', '.join(unused)} and never reads it" if unused else None


def _declarations(subject: Subject, needs: Needs, reads: set[str]) -> dict[str, bool]:
    """What the needs declare, and whether it was read."""
    told = subject.ordinary.log.learns  # on_commit carries the new ids too
    declared: dict[str, bool] = {}
    if needs.tokens is Tokens.HISTORY:
        declared["tokens=HISTORY"] = "history" in reads
    elif needs.tokens is Tokens.NEW:
        declared["tokens=NEW"] = bool({"ids", "last_token"} & reads) or told
    if needs.taps:
        declared["taps"] = "taps" in reads
    if needs.kv:
        declared["kv"] = "kv" in reads
    for module in sorted(needs.modules):
        declared[f"modules[{module}]"] = f"modules[{module}]" in reads
    return declared
