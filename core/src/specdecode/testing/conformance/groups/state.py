"""Whether a proposer with state drafts what it would draft had it seen the whole history at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....contract import Memory, Needs
from ..checks import Broken, Group, NotApplicable
from ..comparing import differences

if TYPE_CHECKING:
    from ...recording import DraftRecord
    from ..probe import Log, RowRecord
    from ..subject import Subject

GROUP = Group("state", order=80)

#: Most drafts of a run that are compared; each costs a forward over its whole history.
_MOST = 60


def _fed(needs: Needs) -> str:
    return "" if needs.kv or needs.taps else "Needs declare neither kv nor taps"


def _of_tokens(needs: Needs) -> str:
    if needs.kv or needs.taps:
        return "state.as-stateless is about methods with kv or taps"
    return "" if needs.memory is Memory.REQUEST else "Needs.memory is NAMESPACE"


@GROUP.check("as-stateless", "``own_len`` entries are true.", applies=_fed)
def as_stateless(subject: Subject) -> str | None:
    """Through chunked prompts, prefix hits, preemptions and spells without a budget."""
    _compare(subject, subject.ordinary.log, "an ordinary run")
    _compare(subject, subject.stress.log, "a run with preemptions and spells without a budget")
    return None


@GROUP.check("after-failures", "after a failure, or a prefix hit in blocks", applies=_fed)
def after_failures(subject: Subject) -> str | None:
    _compare(subject, subject.failing.log, "a run in which calls of propose fail")
    return None


@GROUP.check("through-preemptions", "the same request, admitted again", applies=_of_tokens)
def through_preemptions(subject: Subject) -> str | None:
    """The same requests with blocks for all of them, and with so few that some are preempted."""
    resumed = [row for row in subject.preempted.log.rows if row.resumed and subject.fixed(row.params)]
    before = subject.ordinary.log.rows
    compared, found = differences(before, resumed, alike=_same_tokens)
    if found:
        raise Broken(
            f"{len(found)} of {compared} drafts behind a preemption are others than without one; "
            f"on_add(resumed=True) brings all ids again: {found[0]}"
        )
    if not compared:
        return "no draft was made behind a preemption, so nothing was seen"
    _, found = differences(before, resumed)
    return (
        f"{len(found)} of {compared} drafts are longer or shorter than without it: {found[0]}"
        if found
        else None
    )


def _same_tokens(one: RowRecord, other: RowRecord) -> bool:
    """How many there are may go by what was asked for before; which ones may not."""
    nodes = zip(zip(*one.taken, strict=True), zip(*other.taken, strict=True), strict=False)
    return all(node == counterpart for node, counterpart in nodes)


def _compare(subject: Subject, log: Log, where: str) -> None:
    from ....models import Decoder
    from ....sampling import UnseededStream, resolve_seed
    from ...recording import wrong_drafts
    from ...reference import DenseStep, StatelessDrafter

    if not isinstance(subject.toy.model, Decoder):
        raise NotApplicable("the reference of state wants a target of a native family")
    drafter = StatelessDrafter(subject.toy.model, subject.toy.info, subject.mapping, manager=subject.manager)

    def stateless(record: DraftRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return drafter.drafts(
            DenseStep(
                history=record.history,
                prompt_len=record.prompt_len,
                params=record.params,
                budget=record.budget,
                room=record.room,
                seed=resolve_seed(record.params.seed, UnseededStream(0)),
                eos=() if record.params.ignore_eos else subject.toy.eos_ids,
            )
        )

    drafted = [row for row in log.rows if row.budget and subject.fixed(row.params)]
    every = -(-len(drafted) // _MOST) or 1
    records = [_record(row, log) for row in drafted[::every]]
    wrong = wrong_drafts(records, stateless)
    if wrong:
        raise Broken(f"{len(wrong)} of {len(records)} drafts of {where} are not the reference's: {wrong[0]}")


def _record(row: RowRecord, log: Log) -> DraftRecord:
    from ...recording import DraftRecord

    ids, parents = row.taken
    return DraftRecord(
        request_id=row.request_id,
        history=row.history,
        prompt_len=log.prompt_lens[row.request_id],
        params=row.params,
        budget=row.budget,
        room=row.room,
        ids=ids,
        parents=parents,
    )
