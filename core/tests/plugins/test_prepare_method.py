"""speculative_config becomes a method with checked keys and known needs, and is then built."""

from __future__ import annotations

import json
import sys

import attrs
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from specdecode.config import SpeculativeConfig
from specdecode.contract import (
    ConfigError,
    DraftModelFields,
    LengthFields,
    Match,
    Needs,
    Proposer,
    ProposerSpec,
    Unsupported,
    option,
)
from specdecode.plugins import PluginError, PluginManager, hookimpl, prepare


class Scripted(Proposer):
    def __init__(self, config, context, children=()):
        self.config, self.context, self.children = config, context, children

    def propose(self, step, out):
        return None


def chain(config, ctx):
    return Needs(width=config.num_speculative_tokens, depth=config.num_speculative_tokens)


@attrs.frozen(kw_only=True)
class HeadConfig(DraftModelFields):
    """Keys of a method with a checkpoint."""

    num_speculative_tokens: int = option("draft tokens proposed a step")


@attrs.frozen(kw_only=True)
class PairConfig:
    """Keys of a method made of two."""

    first: dict[str, object] = option("keys of the first")
    second: dict[str, object] = option("keys of the second")


def pair_needs(config, ctx):
    children = [ctx.needs_of("chain", config.first), ctx.needs_of("chain", config.second)]
    return Needs.union(*children)


def pair_build(config, ctx):
    assert ctx.needs_of("chain", config.first) == ctx.needs.children[0]
    return Scripted(config, ctx, [ctx.build("chain", config.first), ctx.build("chain", config.second)])


class Half:
    """Some of a proposer's methods."""

    load = bind = on_add = on_commit = on_preempt = on_finish = on_target_updated = propose = close = len


class Whole(Half):
    """All of them, without being a Proposer."""

    most = None
    warm = metrics = len


ALL_OF_IT = (
    "most, load, bind, warm, on_add, on_commit, on_preempt, on_finish, on_target_updated, propose, "
    "metrics, close"
)


def head_needs(config, ctx):
    if ctx.draft.config["hidden_size"] != ctx.target.hidden_size:
        raise Unsupported("hidden sizes differ: choose a head of this target")
    return chain(config, ctx)


def spec(name, config=LengthFields, needs=chain, build=Scripted, **options):
    return ProposerSpec(name=name, summary="", api=1, config=config, needs=needs, build=build, **options)


class Plugin:
    specs = (
        spec("chain"),
        spec(
            "head",
            HeadConfig,
            head_needs,
            recognize=lambda c: Match("fc") if "fc.weight" in c.tensors else None,
        ),
        spec("pair", PairConfig, pair_needs, pair_build),
        spec("eager", PairConfig, pair_needs, lambda config, ctx: Scripted(config, ctx)),
        spec("swapped", PairConfig, pair_needs, lambda c, ctx: ctx.build("chain", c.second)),
        spec("secretive", build=lambda c, ctx: ctx.build("chain", {"num_speculative_tokens": 1})),
        spec("no_needs", needs=lambda config, ctx: None),
        spec("raising", needs=lambda config, ctx: 1 / 0),
        spec("unbuildable", build=lambda config, ctx: __import__("acme_absent")),
        spec("exiting", needs=lambda config, ctx: sys.exit(3)),
        spec("exiting_late", build=lambda config, ctx: sys.exit("no driver")),
        spec("built_nothing", build=lambda config, ctx: None),
        spec("built_text", build=lambda config, ctx: "proposer"),
        spec("built_module", build=lambda config, ctx: torch.nn.Linear(1, 1)),
        spec("built_half", build=lambda config, ctx: Half()),
        spec("built_class", build=lambda config, ctx: Scripted),
        spec("built_whole", build=lambda config, ctx: Whole()),
        spec("heavy", imports=("acme_absent.core",)),
    )

    @hookimpl
    def specdecode_proposers(self):
        return self.specs


@pytest.fixture
def manager():
    manager = PluginManager(allow=())
    manager.register(Plugin(), "test")
    return manager


@pytest.fixture
def head(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    save_file({"fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def faults(*arguments):
    with pytest.raises(ConfigError) as raised:
        prepare(*arguments)
    return raised.value.faults


@pytest.mark.parametrize("form", [dict, SpeculativeConfig, json.dumps])
def test_every_form_of_the_mapping(manager, target, form):
    given = {"method": "chain", "num_speculative_tokens": 3, "disable_by_batch_size": 8}
    prepared = prepare(manager, form(given), target)
    assert prepared.method == "chain"
    assert prepared.policy.disable_by_batch_size == 8
    assert prepared.config == LengthFields(num_speculative_tokens=3)
    assert prepared.needs == Needs(width=3, depth=3)
    proposer = prepared.build(max_num_seqs=5)
    assert proposer.config is prepared.config
    assert (proposer.context.max_num_seqs, proposer.context.needs) == (5, prepared.needs)
    assert proposer.context.target is target


def test_policy_and_method_keys_are_refused_together(manager, target):
    given = {
        "method": "chain",
        "num_speculative_token": 3,
        "adaptve": True,
        "disable_by_batch_size": 1,
        "posterior_alpha": 2.0,
    }
    assert set(faults(manager, given, target)) == {
        "speculative_config.disable_by_batch_size must be at least 2, got 1",
        "speculative_config.posterior_alpha must be above 0 and at most 1, got 2.0",
        "speculative_config.num_speculative_tokens is required: draft tokens proposed a step, 1 to 1024",
        "speculative_config.num_speculative_token is not a known key; did you mean 'num_speculative_tokens'?",
        "speculative_config.adaptve is not a known key; did you mean 'adaptive'?",
    }


def test_fewer_drafts_than_were_declared(manager, target):
    """What ``Proposer.most`` tells behind ``bind``."""
    prepared = prepare(manager, {"method": "chain", "num_speculative_tokens": 5}, target)
    assert prepared.narrowed(None) is prepared
    fewer = prepared.narrowed(3)
    assert (fewer.needs.width, fewer.needs.depth) == (3, 3) and prepared.needs.width == 5
    assert fewer.policy is prepared.policy and fewer.method == "chain"
    assert type(prepared.narrowed(np.int64(3)).needs.width) is int
    for most in (0, 6, "3", 2.0):
        with pytest.raises(PluginError, match=rf"width=5.*most={most!r}: .* between 1 and that"):
            prepared.narrowed(most)


def test_a_method_that_is_no_name(manager, target):
    assert faults(manager, {"method": 3}, target) == (
        "speculative_config.method must be a string or None, got 3 (draft method, or distribution:method; "
        "none: the one that recognises the draft checkpoint)",
    )
    (fault,) = faults(manager, {"method": "chian", "num_speculative_tokens": 3}, target)
    assert fault.startswith("speculative_config.method 'chian' is unknown: did you mean 'chain'?")


def test_a_missing_module_is_named_with_the_provider(manager, target):
    (fault,) = faults(manager, {"method": "heavy", "num_speculative_tokens": 3}, target)
    assert fault == (
        "speculative_config: method 'heavy' of in-process needs the module acme_absent.core, "
        "which is not installed; install the distribution that carries it"
    )


def test_a_missing_module_leads_to_the_requirement_that_is_missing(site, target):
    site.add_plugin(
        "acme-heavy",
        methods=["heavy"],
        imports=["acme_absent"],
        requires=["specdec-core>=0.1", "acme-absent>=2", "???", "acme-test; extra == 'test'"],
    )
    (fault,) = faults(PluginManager(), {"method": "heavy", "num_speculative_tokens": 3}, target)
    assert fault.endswith("acme_absent, which is not installed; pip install 'acme-absent>=2'")


# -- checkpoints ---------------------------------------------------------------------------------------
def test_the_method_may_be_left_out_if_the_checkpoint_tells(manager, target, head):
    prepared = prepare(manager, {"model": str(head), "num_speculative_tokens": 2}, target)
    assert prepared.method == "head"
    assert prepared.build(1).context.draft.tensors.keys() == {"fc.weight"}


def test_without_method_and_model(manager, target):
    (fault,) = faults(manager, {"num_speculative_tokens": 2}, target)
    assert fault.startswith("speculative_config names neither method nor model")
    assert "chain" in fault
    assert "speculative_config.model must be a string, got 3" in faults(manager, {"model": 3}, target)


def test_a_reader_of_the_callers_own(manager, target, head):
    asked = []

    def reader(path, revision=None, *, field):
        from specdecode.plugins import read_checkpoint

        asked.append((path, revision, field))
        return read_checkpoint(head)

    given = {"model": "draft.gguf", "revision": "v1", "num_speculative_tokens": 2}
    prepared = prepare(manager, given, target, reader=reader)
    assert prepared.method == "head"
    assert asked == [("draft.gguf", "v1", "speculative_config.model")]  # read once


def test_a_method_that_cannot_serve_this_target(manager, target, head):
    other = attrs.evolve(target, hidden_size=32)
    with pytest.raises(Unsupported, match=r"method 'head' of in-process: hidden sizes differ: choose a head"):
        prepare(manager, {"model": str(head), "num_speculative_tokens": 2}, other)


# -- proposers made of proposers ------------------------------------------------------------------------
PAIR = {"first": {"num_speculative_tokens": 2}, "second": {"num_speculative_tokens": 5}}


def test_children_are_planned_and_built(manager, target):
    prepared = prepare(manager, {"method": "pair", **PAIR}, target)
    assert [child.width for child in prepared.needs.children] == [2, 5]
    proposer = prepared.build(4)
    assert [child.config.num_speculative_tokens for child in proposer.children] == [2, 5]
    assert [child.context.needs for child in proposer.children] == list(prepared.needs.children)
    assert {child.context.max_num_seqs for child in proposer.children} == {4}


def test_a_fault_of_a_child_says_where(manager, target):
    given = {"method": "pair", "first": {"num_speculative_tokens": 0}, "second": {}}
    assert faults(manager, given, target) == (
        "speculative_config[chain].num_speculative_tokens must be between 1 and 1024, got 0",
    )


def list_needs(config, ctx):
    children = [
        ctx.needs_of(keys.get("method"), {k: v for k, v in keys.items() if k != "method"}, f"{name}[{i}]")
        for name in ("first", "second")
        for i, keys in enumerate([getattr(config, name)])
    ]
    return Needs.union(*children)


class Listing:
    """A method that names its children's fields, and one that blames the root for its own."""

    @hookimpl
    def specdecode_proposers(self):
        def blames(config, ctx):
            raise ConfigError(f"speculative_config.model: of no use at {config.num_speculative_tokens}")

        yield spec("listing", PairConfig, list_needs)
        yield spec("blaming", needs=blames)


def test_children_are_named_by_a_field_of_their_parent(manager, target, head):
    manager.register(Listing(), "listing")
    two = {"num_speculative_tokens": 2}
    given = {"method": "listing", "first": {"method": "chain", **two}, "second": {"model": str(head), **two}}
    assert [child.width for child in prepare(manager, given, target).needs.children] == [2, 2]
    wrong = {"method": "chain", "num_speculative_tokens": 0}
    path = "speculative_config.first[0]"
    for first, fault in (
        (wrong, f"{path}.num_speculative_tokens must be between 1 and 1024, got 0"),
        ({"method": 3}, f"{path}.method must be a string, got 3"),
        ({"method": "blaming", **two}, f"{path}.model: of no use at 2"),
        # Children of children: what bears a path already is not moved again.
        (
            {"method": "listing", "first": {"method": "blaming", **two}, "second": {}},
            f"{path}.first[0].model: of no use at 2",
        ),
    ):
        assert faults(manager, {**given, "first": first}, target) == (fault,)
    (fault,) = faults(manager, {**given, "first": two}, target)
    assert fault.startswith(f"{path} names neither method nor model; set {path}.method to one of")


def test_the_methods_that_could_be_used_are_told(manager, target):
    told = []

    class Asking:
        @hookimpl
        def specdecode_proposers(self):
            yield spec("asking", needs=lambda config, ctx: told.extend(ctx.methods) or chain(config, ctx))

    manager.register(Asking(), "asking")
    prepare(manager, {"method": "asking", "num_speculative_tokens": 1}, target)
    names = [spec.name for spec in told]
    assert {"asking", "chain", "head", "pair"} <= set(names) and names == sorted(names)
    assert "heavy" not in names  # what it imports is not there


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("eager", "needs declares 2 children, build made 0"),
        ("swapped", "build makes 'chain' as child 0, which Needs.children declares otherwise"),
        ("secretive", "build makes 'chain', which its Needs does not declare; use Needs.union"),
    ],
)
def test_children_that_differ_from_the_declared_ones(manager, target, method, message):
    keys = {"num_speculative_tokens": 2} if method == "secretive" else PAIR
    prepared = prepare(manager, {"method": method, **keys}, target)
    with pytest.raises(PluginError, match=f"method '{method}' of in-process: {message}"):
        prepared.build(1)


# -- faults of a plugin --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("no_needs", "needs must give a Needs, got NoneType"),
        ("built_nothing", f"build must return a Proposer, got None, which has no {ALL_OF_IT}: subclass"),
        ("built_text", f"build must return a Proposer, got 'proposer', which has no {ALL_OF_IT}: subclass"),
        ("built_module", f"build must return a Proposer, got Linear, which has no {ALL_OF_IT}: subclass"),
        ("built_half", "build must return a Proposer, got Half, which has no most, warm, metrics: subclass"),
        ("built_class", "build must return a Proposer, got the class Scripted: return an instance of it"),
        ("raising", "needs raised ZeroDivisionError: division by zero"),
        ("exiting", "needs raised SystemExit: 3"),
        ("exiting_late", "build raised SystemExit: no driver"),
        ("unbuildable", "build raised ModuleNotFoundError: No module named 'acme_absent'"),
    ],
)
def test_a_plugin_that_breaks_the_contract(manager, target, method, message):
    with pytest.raises(PluginError, match=f"method '{method}' of in-process: {message}"):
        prepare(manager, {"method": method, "num_speculative_tokens": 2}, target).build(1)


def test_what_has_all_that_a_proposer_has_is_one(manager, target):
    prepared = prepare(manager, {"method": "built_whole", "num_speculative_tokens": 2}, target)
    assert isinstance(prepared.build(1), Whole)


def test_a_method_that_exits_while_it_loads(manager, target):
    prepared = prepare(manager, {"method": "chain", "num_speculative_tokens": 2}, target)
    with (
        pytest.raises(PluginError, match="method 'chain' of in-process: load raised SystemExit: 1"),
        prepared.outlived("load"),
    ):
        sys.exit(1)
    for passed_on in (KeyboardInterrupt, MemoryError):
        with pytest.raises(passed_on), prepared.outlived("load"):
            raise passed_on


def test_the_targets_own_checkpoint_is_read_once_when_it_is_asked_for(target, head):
    """For methods whose weights the target's files hold."""
    asked = []

    def reader(path, revision=None, *, field):
        from specdecode.plugins import read_checkpoint

        asked.append((path, revision, field))
        return read_checkpoint(head)

    def needs(config, ctx):
        assert ctx.draft is None
        assert "fc.weight" in ctx.target_checkpoint.tensors and "fc.weight" in ctx.target_checkpoint.tensors
        return chain(config, ctx)

    def build(config, ctx):
        return Scripted(config, ctx, [ctx.target_checkpoint])

    class Own:
        @hookimpl
        def specdecode_proposers(self):
            yield spec("own", needs=needs, build=build)
            yield spec("other")

    manager = PluginManager(allow=())
    manager.register(Own(), "test")
    length = {"num_speculative_tokens": 2}
    prepare(manager, {"method": "other", **length}, target, reader=reader)
    assert asked == []
    built = prepare(manager, {"method": "own", **length}, target, reader=reader).build(max_num_seqs=4)
    assert built.children[0].path == head
    assert asked == [(target.path, None, "model")]
