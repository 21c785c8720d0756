"""From the children's configurations to what a combination needs; torch-free."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from specdecode.contract import (
    BuildContext,
    ConfigError,
    Memory,
    Needs,
    PlanContext,
    Probs,
    Proposer,
    Ranks,
    Shape,
    SpecdecodeError,
    Unsupported,
)

from .config import AutoConfig, CascadeConfig, ExtendConfig

_log = logging.getLogger(__name__)


@attrs.frozen
class Choice:
    """A child as it is configured."""

    method: str | None  #: None: the one that recognises its checkpoint
    keys: Mapping[str, Any]
    field: str  #: what messages call it

    @classmethod
    def of(cls, proposers: Sequence[Mapping[str, Any]]) -> list[Choice]:
        """Those of the key ``proposers``."""
        return [
            cls(given.get("method"), {key: given[key] for key in given if key != "method"}, f"proposers[{i}]")
            for i, given in enumerate(proposers)
        ]

    @property
    def name(self) -> str:
        """For metrics."""
        return self.method or "model"


# -- needs -----------------------------------------------------------------------------------------
def cascade_needs(config: CascadeConfig, context: PlanContext) -> Needs:
    children = _needs_of_all(Choice.of(config.proposers), context)
    if config.min_score:
        for index, child in enumerate(children[:-1]):
            if not child.scores:
                raise Unsupported(
                    f"min_score={config.min_score:g} would keep proposers[{index}] from ever drafting: its "
                    "method gives no scores with this config; put it last, or leave min_score out"
                )
    return attrs.evolve(Needs.union(*children), probs=_cascade_probs(children))


def extend_needs(config: ExtendConfig, context: PlanContext) -> Needs:
    children = _needs_of_all(Choice.of(config.proposers), context)
    for index, child in enumerate(children):
        if child.shape is Shape.TREE and index < len(children) - 1:
            raise Unsupported(
                f"proposers[{index}] drafts trees, and what comes behind it goes on from a chain: configure "
                "it as a chain"
            )
        if index and not child.continues:
            raise Unsupported(
                f"the method of proposers[{index}] cannot go on from drafts: put a lookup there, such as "
                "prompt lookup"
            )
    needs = Needs.union(
        *children, width=sum(child.width for child in children), depth=sum(child.depth for child in children)
    )
    # What goes on from drafts looks them up; only the first may draw.
    return attrs.evolve(needs, probs=children[0].probs, continues=children[0].continues)


def auto_needs(config: AutoConfig, context: PlanContext) -> Needs:
    children = _needs_of_all(candidates(config, context), context)
    union, ranks = Needs.union(*children), context.target.tensor_parallel_size
    if ranks > 1 and union.ranks is Ranks.ALL:
        raise Unsupported(
            f"it goes by a clock, and tensor_parallel_size={ranks} ranks have each their own; some of "
            "its proposers run on all ranks: give it lookups alone, or use one method"
        )
    return attrs.evolve(
        union,
        # Which method drafts is settled before any of them draws.
        probs=Probs.FULL if any(child.probs is Probs.FULL for child in children) else Probs.NONE,
        graphs=False,  # it is the host that chooses
        memory=Memory.NAMESPACE,
        continues=False,  # a choice depends on the steps before
    )


def _cascade_probs(children: Sequence[Needs]) -> Probs:
    """FULL where who drafts a row does not depend on what is drawn.

    Who tells laws is judged by the law of its first draft. Who tells none may be judged by what it drew,
    unless it sees tokens alone and looks them up. The last is not judged.
    """
    if not any(child.probs is Probs.FULL for child in children):
        return Probs.NONE
    settled = (
        child.probs is Probs.FULL or not (child.kv or child.taps or child.modules) for child in children[:-1]
    )
    return Probs.FULL if all(settled) else Probs.NONE


def _needs_of_all(choices: Sequence[Choice], context: PlanContext) -> list[Needs]:
    """Of each child, or the faults of all of them."""
    found: list[Needs] = []
    faults: list[str] = []
    for choice in choices:
        try:
            found.append(context.needs_of(choice.method, choice.keys, choice.field))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return found


# -- children --------------------------------------------------------------------------------------
def candidates(config: AutoConfig, context: PlanContext) -> list[Choice]:
    """What ``auto`` chooses among: what is given, or what is installed and can do with a length alone.

    Raises:
        ConfigError: nothing is found.
    """
    if config.proposers is not None:
        return Choice.of(config.proposers)
    found = []
    for spec in context.methods:
        if issubclass(spec.config, AutoConfig):
            continue
        names = {attribute.name for attribute in attrs.fields(spec.config)}  # type: ignore[arg-type]
        length = {"num_speculative_tokens": config.num_speculative_tokens}
        choice = Choice(spec.name, length if length.keys() <= names else {}, "")
        try:
            context.needs_of(choice.method, choice.keys, choice.field)
        except SpecdecodeError as error:  # it wants a checkpoint, say, or another target
            _log.debug("auto leaves out %s: %s", spec.name, error)
            continue
        found.append(choice)
    if not found:
        raise ConfigError(
            "speculative_config.proposers is required: no installed method drafts for this target without a "
            "checkpoint"
        )
    return found


def build_all(choices: Sequence[Choice], context: BuildContext) -> list[Proposer]:
    return [context.build(choice.method, choice.keys, choice.field) for choice in choices]
