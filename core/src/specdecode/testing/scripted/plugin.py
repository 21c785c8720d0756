"""The plugin that carries the scripted proposers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...contract import API, BuildContext, Needs, PlanContext, Proposer, ProposerSpec
from ...plugins import default_manager, hookimpl
from . import config as configs
from . import needs, wrapping

if TYPE_CHECKING:
    from ...plugins import PluginManager

#: The name it is registered under.
NAME = "scripted"


# -- builders: heavy modules are imported here -----------------------------------------------------
def _oracle(config: configs.OracleConfig, ctx: BuildContext) -> Proposer:
    from .oracle import OracleProposer

    return OracleProposer(config, ctx.target.vocab_size)


def _liar(config: configs.ScriptFields, ctx: BuildContext) -> Proposer:
    count = config.num_speculative_tokens
    everywhere = configs.OracleConfig(
        num_speculative_tokens=count, texts=config.texts, wrong_at=tuple(range(count))
    )
    return _oracle(everywhere, ctx)


def _ragged(config: configs.ScriptFields, ctx: BuildContext) -> Proposer:
    from .oracle import RaggedProposer

    return RaggedProposer(config)


def _oracle_tree(config: configs.OracleTreeConfig, ctx: BuildContext) -> Proposer:
    from .oracle import OracleTreeProposer

    return OracleTreeProposer(config, ctx.target.vocab_size)


def _self_draft(config: configs.SelfDraftConfig, ctx: BuildContext) -> Proposer:
    from .draft_model import DraftModelProposer

    return DraftModelProposer(ctx.target.path, config.layers)


def _small_draft(config: configs.SmallDraftConfig, ctx: BuildContext) -> Proposer:
    from .draft_model import DraftModelProposer

    return DraftModelProposer(config.model, None)


def _eagle(config: configs.EagleConfig, ctx: BuildContext) -> Proposer:
    from .eagle import EagleProposer

    return EagleProposer(config, ctx.needs)


def _medusa(config: configs.MedusaConfig, ctx: BuildContext) -> Proposer:
    from .medusa import MedusaProposer

    return MedusaProposer(config)


def _sampler(config: configs.SamplerConfig, ctx: BuildContext) -> Proposer:
    from .sampler import SamplerProposer

    return SamplerProposer(config, ctx.target.path)


def _cascade(config: configs.CascadeConfig, ctx: BuildContext) -> Proposer:
    from .cascade import CascadeProposer

    return CascadeProposer([wrapping.build(child, ctx) for child in config.children], ctx.needs)


def _faulty(config: configs.FaultyConfig, ctx: BuildContext) -> Proposer:
    from .faulty import FaultyProposer

    return FaultyProposer(config, ctx.target.vocab_size)


def _wrong(config: configs.WrongConfig, ctx: BuildContext) -> Proposer:
    from .wrong import build

    return build(config, ctx.target.path)


def _flaky(config: configs.FlakyConfig, ctx: BuildContext) -> Proposer:
    from .faulty import FlakyProposer

    return FlakyProposer(wrapping.build(config.inner, ctx), config)


def _recorder(config: configs.RecorderConfig, ctx: BuildContext) -> Proposer:
    from ..recording import recording
    from .recorder import RecorderProposer

    return RecorderProposer(wrapping.build(config.inner, ctx), recording(config.recording))


NeedsOf = Callable[[Any, PlanContext], Needs]
Build = Callable[[Any, BuildContext], Proposer]

_METHODS: tuple[tuple[str, str, type, NeedsOf, Build], ...] = (
    ("oracle", "replays known texts, chosen offsets spoiled", configs.OracleConfig, needs.chain, _oracle),
    ("liar", "always wrong", configs.ScriptFields, needs.chain, _liar),
    (
        "ragged",
        "replays 0 to k tokens, in a cycle",
        configs.ScriptFields,
        needs.chain,
        _ragged,
    ),
    ("oracle-tree", "known texts among decoys", configs.OracleTreeConfig, needs.oracle_tree, _oracle_tree),
    ("self-draft", "the target as its draft model", configs.SelfDraftConfig, needs.self_draft, _self_draft),
    ("small-draft", "a draft checkpoint", configs.SmallDraftConfig, needs.small_draft, _small_draft),
    ("eagle", "an EAGLE-like head with a layer of its own", configs.EagleConfig, needs.eagle, _eagle),
    ("medusa", "Medusa-like heads on a fixed tree", configs.MedusaConfig, needs.medusa, _medusa),
    ("sampler", "draws from a law and tells it", configs.SamplerConfig, needs.sampler, _sampler),
    ("cascade", "the first child that drafts wins", configs.CascadeConfig, needs.cascade, _cascade),
    ("faulty", "an oracle that breaks the contract", configs.FaultyConfig, needs.faulty, _faulty),
    (
        "wrong",
        "an oracle or draft model that breaks an unseen promise",
        configs.WrongConfig,
        needs.wrong,
        _wrong,
    ),
    ("flaky", "another proposer that raises now and then", configs.FlakyConfig, needs.flaky, _flaky),
    ("recorder", "another proposer, written down", configs.RecorderConfig, needs.recorder, _recorder),
)


class ScriptedPlugin:
    """Yields a spec for each scripted proposer, ``scripted-<name>``."""

    @hookimpl
    def specdecode_proposers(self) -> Iterator[ProposerSpec]:
        for name, summary, config, needs_of, build in _METHODS:
            yield ProposerSpec(
                name=f"{NAME}-{name}", summary=summary, api=API, config=config, needs=needs_of, build=build
            )


#: The one object of this process, so that registering it again changes nothing.
PLUGIN = ScriptedPlugin()


def install(manager: PluginManager | None = None) -> None:
    """Register the scripted proposers with ``manager``, by default the process's; again is harmless."""
    (manager or default_manager()).register(PLUGIN, name=NAME)
