"""Makes an engine from its arguments: model, proposer, KV cache and loop, in the order memory asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from .. import models
from ..contract import (
    EMBED,
    LM_HEAD,
    ConfigError,
    Needs,
    Proposer,
    Resources,
    TargetInfo,
)
from ..contract import Ranks as DraftRanks
from ..distributed import SOLO, Group
from ..distributed.executors import executor_called
from ..distributed.lockstep import Ranks
from ..distributed.proposers import LeaderProposer
from ..distributed.starting import start_ranks
from ..engine.admission import Admission
from ..engine.control import DraftPolicy
from ..engine.drafting import Drafting
from ..engine.guard import GuardedProposer
from ..engine.loop import EngineCore
from ..engine.metrics import EngineMetrics
from ..engine.overlapped import OverlappedEngineCore
from ..engine.request import Request
from ..engine.scheduler import Scheduler, SchedulerConfig
from ..engine.verification import Verification
from ..kv import BlockPool
from ..kv.store import KVStore, LayerShape, draft_layers
from ..layers import RotatingBackend
from ..layers.flashinfer_backend import flashinfer_backend
from ..lora.manager import LoRAManager
from ..plugins import PluginManager, Prepared, default_manager
from ..runner.graphs import row_buckets
from ..runner.images import EncodedImages
from ..runner.profiling import measure_steps, target_costs
from ..runner.runner import ModelRunner
from ..verify import Rule
from .adapters import adapters_in_use, room_for_adapters
from .args import EngineArgs
from .drafter import prepare_proposer, rule_of
from .drafting_pace import make_pacer, most_tokens, rests, widths_of
from .images import ImageDoor
from .memory import MemoryPlan, graph_reserve, plan_memory, stage
from .overlapping import captures, make_steady, max_slots, may_capture, overlaps
from .resolution import ResolvedTarget, resolve_target

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class LoadedTarget:
    """The contract's :class:`~specdecode.contract.TargetHandle`."""

    info: TargetInfo
    device: torch.device
    dtype: torch.dtype
    modules: Mapping[str, Any]
    load_weights: Callable[..., Any] = models.load_weights
    group: Group = SOLO
    rank: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rank = self.group.rank


@attrs.frozen(eq=False)
class Engine:
    """What :func:`assemble` made."""

    core: EngineCore
    target: TargetInfo
    tokenizer: Any
    door: ImageDoor | None  #: puts images into prompts; None: the model takes text only
    eos_ids: frozenset[int]
    defaults: Mapping[str, Any]  #: sampling parameters of the model's generation config
    memory: MemoryPlan
    adapters: LoRAManager | None  #: None: there is no room for any
    method: str | None
    manager: PluginManager
    ranks: Ranks
    files: models.ModelFiles
    handle: LoadedTarget  #: the target, as the proposer knows it


class NoLifecycle:
    """Without a proposer nobody wants to know."""

    def added(self, request: Request, *, resumed: bool) -> None:
        return None

    def preempted(self, request: Request) -> None:
        return None


def assemble(args: EngineArgs, manager: PluginManager | None = None, ranks: Ranks | None = None) -> Engine:
    """Load everything ``args`` name.

    Args:
        ranks: that this engine is one of, which have met already; None: it starts the others.

    Raises:
        ConfigError, Unsupported: before any weight is read, and any process started, where that can be known.
        WorkerDied: another rank's process ended.
    """
    target = resolve_target(args)
    manager = manager or _manager(args)
    executor = executor_called(args.distributed_executor_backend, manager.executors)
    if args.tensor_parallel_size > 1 and ranks is None:
        device = args.device if args.device != "auto" else target.device.type
        executor.check(args.tensor_parallel_size, device)
    prepared = prepare_proposer(args, manager, target.info)
    assert target.info.tokenizer is not None
    tokenizer = None if args.skip_tokenizer_init else target.info.tokenizer.load()
    door = _image_door(args, target, tokenizer)
    ranks = ranks or start_ranks(args, args.tensor_parallel_size, target.device, executor)
    with ranks.together():
        return _load(args, manager, target, prepared, tokenizer, door, ranks)


def _load(
    args: EngineArgs,
    manager: PluginManager,
    target: ResolvedTarget,
    prepared: Prepared | None,
    tokenizer: Any,
    door: ImageDoor | None,
    ranks: Ranks,
) -> Engine:
    """What takes memory, in the order in which it is taken; all ranks at once."""
    verification = rule_of(prepared)
    needs = prepared.needs if prepared else None
    group = ranks.group
    with stage("loading the model", target.device, remedy="use a smaller model or dtype='bfloat16'"):
        model = models.load_model(
            target.files,
            dtype=target.dtype,
            device=target.device,
            max_model_len=target.info.max_model_len,
            load_format=args.load_format,
            quantization=target.quantization,
            exact=target.exact,
            backend=_attention_backend(args, target),
            group=group,
            whole_embedding=needs is not None and EMBED in needs.modules,
        )
    with stage("making room for adapters", target.device, remedy="lower max_loras or max_lora_rank"):
        adapters = room_for_adapters(args, model, exact=target.exact)
    with stage("loading the vision tower", target.device, remedy="set limit_mm_per_prompt={'image': 0}"):
        images = None if door is None else _load_tower(args, target, group)
    remedy = "use a smaller draft model, or speculate by a method without weights"
    with stage("loading the draft method", target.device, remedy=remedy) as drafter:
        handle = _handle(prepared, model, target, group)
        proposer = _load_proposer(prepared, args, handle)

    layers, drafts = _kv_layers(target, model.kv_heads, needs)
    steps_a_bucket = len(widths_of(prepared)) + (prepared is not None and rests(prepared))
    memory = _plan_memory(
        args, model, target, needs, layers, drafts, drafter.num_bytes, steps_a_bucket, group, adapters, images
    )
    info = attrs.evolve(target.info, max_model_len=memory.max_model_len)
    pool = BlockPool(memory.num_blocks, args.block_size)
    remedy = "lower gpu_memory_utilization or num_gpu_blocks_override, or end what else runs there"
    with stage("allocating the KV cache", target.device, remedy=remedy, plan=memory):
        store = KVStore(memory.num_blocks, args.block_size, layers, drafts, target.device)
    runner = ModelRunner(model, store, pool, target.device, needs, max_slots(args, info, needs), images)
    remedy = "lower gpu_memory_utilization or max_num_seqs, or set enforce_eager=True"
    with stage("preparing the first step", target.device, remedy=remedy, plan=memory):
        captured = captures(args, runner, needs)
        if prepared is not None and proposer is not None:
            with prepared.outlived("bind or warm"):
                _bind(proposer, args, runner, info, group, captured)
            prepared = prepared.narrowed(proposer.most)
        core = _core(
            args,
            prepared,
            proposer,
            runner,
            pool,
            verification,
            info,
            tokenizer,
            manager.strict,
            group,
            adapters,
            captured,
        )
        core.prepare()
    return Engine(
        core=core,
        target=info,
        tokenizer=tokenizer,
        door=door,
        eos_ids=frozenset(models.eos_token_ids(target.files)),
        defaults=models.default_sampling(target.files),
        memory=memory,
        adapters=adapters,
        method=prepared.method if prepared else None,
        manager=manager,
        ranks=ranks,
        files=target.files,
        handle=handle,
    )


def _plan_memory(
    args: EngineArgs,
    model: Any,
    target: ResolvedTarget,
    needs: Needs | None,
    layers: list[LayerShape],
    drafts: list[list[LayerShape]],
    draft_bytes: int,
    steps_a_bucket: int,
    group: Group,
    adapters: LoRAManager | None,
    images: EncodedImages | None,
) -> MemoryPlan:
    """Measure what the largest steps take, and give KV the rest."""
    remedy = "lower max_num_batched_tokens or max_num_seqs, or use a smaller model"
    with stage("running the largest step", target.device, remedy=remedy):
        steps = measure_steps(
            model,
            layers,
            needs,
            block_size=args.block_size,
            max_tokens=args.token_budget,
            max_rows=args.max_num_seqs,
            max_len=target.info.max_model_len,
        )
    captured = may_capture(args, target.device)  # what cannot be is not known yet
    num_graphs = len(row_buckets(args.max_num_seqs)) * steps_a_bucket if captured else 0
    num_graphs *= 2 if adapters else 1  # with adapters and without
    return plan_memory(
        args,
        model,
        KVStore.block_bytes(args.block_size, layers, drafts),
        target.info.max_model_len,
        target.device,
        scratch_bytes=needs.scratch_bytes if needs else 0,
        draft_bytes=draft_bytes,
        adapter_bytes=adapters.num_bytes if adapters else 0,
        steps=steps,
        graph_bytes=graph_reserve(steps, num_graphs),
        image_bytes=0 if images is None else images.reserve(),
        group=group,
    )


def _image_door(args: EngineArgs, target: ResolvedTarget, tokenizer: Any) -> ImageDoor | None:
    """What puts images into prompts; None: the model takes none, or is not to.

    Raises:
        ConfigError, Unsupported: it takes images, and what that needs is not there or does not go together.
    """
    most = (args.limit_mm_per_prompt or {}).get("image")
    if target.files.vision is None or most == 0:
        return None
    without = "limit_mm_per_prompt={'image': 0} takes text only"
    if tokenizer is None:
        raise ConfigError(
            f"model {args.model!r} takes images, whose placeholders a tokenizer writes: leave "
            f"skip_tokenizer_init out, or {without}"
        )
    return ImageDoor(models.ImagePreprocessor(target.files, tokenizer, target.dtype), most)


def _load_tower(args: EngineArgs, target: ResolvedTarget, group: Group) -> EncodedImages:
    tower = models.VisionTower(
        target.files, dtype=target.dtype, device=target.device, load_format=args.load_format
    )
    return EncodedImages(tower, group=group)


def _manager(args: EngineArgs) -> PluginManager:
    return PluginManager(disabled=args.disable_plugins) if args.disable_plugins else default_manager()


def _kv_layers(
    target: ResolvedTarget, kv_heads: int, needs: Needs | None
) -> tuple[list[LayerShape], list[list[LayerShape]]]:
    """The target's layers, and the proposer's for each KVSpec."""
    info = target.info
    shape = LayerShape(kv_heads, info.head_dim, info.value_dim or info.head_dim, target.kv_dtype)
    drafts = [draft_layers(spec, target.dtype) for spec in needs.kv] if needs else []
    return [shape] * info.num_layers, drafts


def _bind(
    proposer: Proposer,
    args: EngineArgs,
    runner: ModelRunner,
    info: TargetInfo,
    group: Group,
    captured: bool,
) -> None:
    proposer.bind(
        Resources(
            kv=runner.store.drafts,
            block_size=args.block_size,
            max_num_seqs=args.max_num_seqs,
            max_model_len=info.max_model_len,
            costs=lambda points: group.agree(target_costs(runner, points, captured=captured)),
        )
    )
    proposer.warm((), lambda fn, bucket: fn)  # ``propose`` is captured as part of the step


def _attention_backend(args: EngineArgs, target: ResolvedTarget) -> RotatingBackend | None:
    """None: our own kernels."""
    if args.attention_backend != "flashinfer":
        return None
    return flashinfer_backend(target.device, target.dtype)


def _handle(prepared: Prepared | None, model: Any, target: ResolvedTarget, group: Group) -> LoadedTarget:
    """The target with those of its parts that the proposer asks for."""
    parts = {EMBED: model.embed_tokens, LM_HEAD: model.compute_logits}
    modules = {name: parts[name] for name in prepared.needs.modules} if prepared else {}
    return LoadedTarget(target.info, target.device, target.dtype, modules, group=group)


def _load_proposer(prepared: Prepared | None, args: EngineArgs, handle: LoadedTarget) -> Proposer | None:
    if prepared is None:
        return None
    proposer = prepared.build(args.max_num_seqs)
    if handle.group.size > 1 and prepared.needs.ranks is DraftRanks.LEADER:
        proposer = LeaderProposer(proposer, prepared.needs, handle.group)
    with prepared.outlived("load"):
        proposer.load(handle)
    return proposer


def _core(
    args: EngineArgs,
    prepared: Prepared | None,
    proposer: Proposer | None,
    runner: ModelRunner,
    pool: BlockPool,
    verification: Rule,
    info: TargetInfo,
    tokenizer: Any,
    strict: bool,
    group: Group,
    adapters: LoRAManager | None,
    captured: bool,
) -> EngineCore:
    needs = prepared.needs if prepared else None
    metrics = EngineMetrics(needs.depth if needs else 0, mark=verification.mark)
    drafting = None
    if prepared is not None and proposer is not None:
        policy = DraftPolicy(
            width=prepared.needs.width,
            disable_by_batch_size=prepared.policy.disable_by_batch_size,
            per_batch_size=prepared.policy.num_speculative_tokens_per_batch_size,
            pacer=make_pacer(prepared, metrics),
        )
        guarded = GuardedProposer(proposer, prepared.method, strict=strict)
        metrics.follow("specdecode:proposer_failures", lambda: guarded.failures)
        drafting = Drafting(guarded, prepared.needs, policy, runner, info.vocab_size, metrics, verification)
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.token_budget,
        chunked_prefill=args.enable_chunked_prefill,
        prefix_caching=args.enable_prefix_caching,
        draft_layers=bool(needs and needs.kv),
        tapped=bool(needs and needs.taps),
        draft_reserve=needs.reserve if needs else 0,
    )
    if not config.chunked_prefill and args.token_budget < info.max_model_len:
        raise ConfigError(
            f"enable_chunked_prefill=False wants max_num_batched_tokens of at least max_model_len="
            f"{info.max_model_len}, got {args.token_budget}: raise it, or leave chunked prefill on"
        )
    slots = adapters.slots if adapters else None
    scheduler = Scheduler(config, pool, drafting or NoLifecycle(), len(needs.kv) if needs else 0, slots)
    metrics.follow("vllm:num_preemptions", lambda: scheduler.num_preemptions)
    metrics.gauge("vllm:num_requests_running", lambda: scheduler.num_running)
    metrics.gauge("vllm:num_requests_waiting", lambda: scheduler.num_waiting)
    metrics.gauge("vllm:kv_cache_usage_perc", lambda: pool.usage)
    if slots is not None:
        metrics.read(lambda: adapters_in_use(scheduler))
        metrics.follow("specdecode:lora_loads", lambda: slots.num_loads)
    parts: dict[str, Any] = {
        "scheduler": scheduler,
        "runner": runner,
        "verification": Verification(verification, info.vocab_size),
        "drafting": drafting,
        "metrics": metrics,
        "tokenizer": tokenizer,
        "agree": group.agree,
    }
    if not overlaps(args, runner.device):
        return EngineCore(**parts)
    steady = make_steady(
        args,
        runner,
        info,
        needs,
        verification,
        captured=captured,
        widths=widths_of(prepared),
        most_tokens=most_tokens(prepared),
    )
    return OverlappedEngineCore(steady=steady, admission=Admission(args.max_admission_delay), **parts)
