"""The target before any weight is read: its files, dtype, device, and what it can be asked for."""

from __future__ import annotations

import attrs
import torch

from .. import models
from ..contract import ConfigError, TargetInfo
from .adapters import check_adapters
from .args import EngineArgs


@attrs.frozen(eq=False)
class ResolvedTarget:
    """The target before any weight is read."""

    files: models.ModelFiles
    device: torch.device
    dtype: torch.dtype
    exact: bool
    info: TargetInfo
    kv_dtype: torch.dtype  #: of its KV cache
    quantization: str | None  #: to be made of the checkpoint's weights


def resolve_target(args: EngineArgs) -> ResolvedTarget:
    device = models.resolve_device(args.device)
    files = models.resolve_model(
        args.model,
        revision=args.revision,
        load_format=args.load_format,
        trust_remote_code=args.trust_remote_code,
    )
    quantization = models.quantization_to_make(args.quantization, files.hf_config, files.name)
    models.check_architecture(files, quantization=quantization, exact=args.exact)
    check_adapters(args, files)
    dtype = torch.bfloat16  # what int8 weights compute in
    if quantization is None or args.dtype != "auto":
        dtype = models.resolve_dtype(args.dtype, files.hf_config, device)
    models.check_quantization(quantization, dtype, device, files)
    longest = models.resolve_max_model_len(args.max_model_len, files.hf_config)
    tokenizer = models.tokenizer_of(
        files, args.tokenizer, mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code
    )
    info = models.describe_target(
        files,
        dtype=dtype,
        device=device,
        max_model_len=longest,
        tensor_parallel_size=args.tensor_parallel_size,
        tokenizer=tokenizer,
    )
    exact = models.is_native(files) and _exact(args, dtype, device, info)
    kv_dtype = _kv_dtype(args, dtype, device, info)
    return ResolvedTarget(files, device, dtype, exact, info, kv_dtype, quantization)


def _exact(args: EngineArgs, dtype: torch.dtype, device: torch.device, target: TargetInfo) -> bool:
    """Whether rows are to be invariant: as a rule wherever the kernels can do it."""
    obstacle = models.why_not_exact(dtype, device, target)
    if args.attention_backend == "flashinfer":
        obstacle = "is not to be had of attention_backend='flashinfer': leave that out"
    if args.exact and obstacle:
        raise ConfigError(f"exact=True {obstacle}")
    return obstacle is None and args.exact is not False


def _kv_dtype(args: EngineArgs, dtype: torch.dtype, device: torch.device, target: TargetInfo) -> torch.dtype:
    """What the target's KV is stored in; ConfigError where the kernels do not store float8."""
    if args.kv_cache_dtype == "auto":
        return dtype
    obstacle = models.why_not_exact(dtype, device, target)  # its kernels are those that know float8
    if args.attention_backend == "flashinfer":
        obstacle = "is not to be had of attention_backend='flashinfer': leave that out"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        obstacle = "takes a card of compute capability 8.9 on, such as L4 or H100"
    if obstacle:
        raise ConfigError(
            f"kv_cache_dtype={args.kv_cache_dtype!r} {obstacle}; or leave kv_cache_dtype at 'auto'"
        )
    return torch.float8_e4m3fn
