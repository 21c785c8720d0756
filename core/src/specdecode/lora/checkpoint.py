"""An adapter's files against the model they are for: checked by their headers, read when they are wanted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import attrs
import torch

from ..contract import ConfigError
from ..layers.adapters import Factors
from ..layers.linear import Linear
from ..models.weights import StoredTensor, open_weights, stored_in
from ..plugins.checkpoint import locate
from .config import CONFIG, LoRAConfig, read_config

WEIGHTS = "adapter_model.safetensors"
#: What PEFT puts before the names of the base model's modules.
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
#: What of a tensor's name says that it is no factor of a linear layer, and what it is.
_OTHERS = (
    ("lora_magnitude_vector", "DoRA's magnitudes"),
    ("lora_embedding_", "an adapter of the embeddings"),
    ("modules_to_save", "a whole module"),
    ("token_adapter", "trained embeddings"),
    (".bias", "a trained bias"),
)


@attrs.frozen
class Target:
    """A module of the base model that may be adapted: a part of a linear layer."""

    layer: Linear
    part: str

    @property
    def in_features(self) -> int:
        """Of all ranks."""
        return self.layer.shape("weight", self.part)[1]

    @property
    def out_features(self) -> int:
        """Of all ranks."""
        return self.layer.shape("weight", self.part)[0]

    def share_of(self, a: torch.Tensor, b: torch.Tensor) -> Factors:
        """What this rank needs of ``A [r, in]`` and ``B [out, r]``: of the one or of the other its share.

        Where ranks share out the inputs, each adds a term, which are summed as the products are.
        """
        share = self.layer.share("weight", self.part)
        if share is None:
            return a, b
        return (a, b[share.index]) if share.dim == 0 else (a[share.index].contiguous(), b)


@attrs.frozen(eq=False)
class AdapterFiles:
    """An adapter that fits the model, not read yet."""

    folder: Path
    config: LoRAConfig
    modules: Mapping[str, tuple[StoredTensor, StoredTensor]]  #: module -> A and B
    stamp: tuple[object, ...]  #: of the files as they were checked

    def read(self, dtype: torch.dtype) -> dict[str, Factors]:
        """``module -> (A, B)`` on the CPU in ``dtype``, the scale in B.

        Raises:
            ConfigError: the weights cannot be read.
        """
        factors: dict[str, Factors] = {}
        with open_weights(self.folder / WEIGHTS) as tensors:
            for module, (a, b) in self.modules.items():
                scaled = tensors.get_tensor(b.name).float() * self.config.scale_of(module)
                factors[module] = tensors.get_tensor(a.name).to(dtype), scaled.to(dtype)
        return factors


def find_adapter(path: str, field: str) -> Path:
    """The directory of an adapter; ConfigError if there is none, which calls it ``field``."""
    folder = Path(path).expanduser()
    if not folder.exists():
        folder = locate(path, None, field)
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        remedy = "give the directory that save_pretrained of PEFT wrote"
        if (folder / "adapter_model.bin").is_file() and missing == [WEIGHTS]:
            remedy = "adapter_model.bin is pickled: save it again with safe_serialization=True"
        raise ConfigError(f"{field}={path!r} has no {' and no '.join(missing)}; {remedy}")
    return folder


def stamp_of(folder: Path) -> tuple[object, ...]:
    """Changes when one of the adapter's files does."""
    stats = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)


def check_adapter(folder: Path, targets: Mapping[str, Target], max_rank: int) -> AdapterFiles:
    """Read an adapter's config and headers, and see that it fits the model.

    Args:
        targets: what may be adapted, by its name in the base model.

    Raises:
        ConfigError: what does not fit, or is not served: everything of it.
    """
    stamp = stamp_of(folder)
    config = read_config(folder)
    if config.rank > max_rank:
        raise ConfigError(_too_large(folder, "r", config.rank, max_rank))
    found, faults = _factors(folder / WEIGHTS, targets)
    selected = {module for module in targets if config.selects(module)}
    if not selected:
        faults.append(
            f"{folder / CONFIG}: target_modules={config.target_modules!r} selects no module that can be "
            f"adapted: {_kinds(targets)}"
        )
    for module in sorted(selected | set(found)):
        faults += _misfits(folder, module, found.get(module, {}), targets[module], config, module in selected)
    large = sorted({config.rank_of(module) for module in found if config.rank_of(module) > max_rank})
    faults += [_too_large(folder, "rank_pattern", rank, max_rank) for rank in large]
    if faults:
        raise ConfigError(*faults[:8], *([f"and {len(faults) - 8} more"] if len(faults) > 8 else []))
    modules = {module: (pair["A"], pair["B"]) for module, pair in found.items()}
    return AdapterFiles(folder, config, modules, stamp)


def _factors(
    file: Path, targets: Mapping[str, Target]
) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """``module -> A and B`` of a file, and what is in it that cannot be served."""
    found: dict[str, dict[str, StoredTensor]] = {}
    faults: list[str] = []
    for tensor in stored_in(file):
        match = _FACTOR.fullmatch(tensor.name.removeprefix(_PREFIX))
        other = next((what for mark, what in _OTHERS if mark in tensor.name), None)
        if match is None or other is not None:
            faults.append(
                f"tensor {tensor.name} of {file} is not served: {other or 'it is no lora_A or lora_B'}"
            )
        elif match["module"] not in targets:
            faults.append(
                f"tensor {tensor.name} of {file}: {match['module']} cannot be adapted; the model's modules "
                f"that can are {_kinds(targets)}"
            )
        else:
            found.setdefault(match["module"], {})[match["factor"]] = tensor
    return found, faults


def _misfits(
    folder: Path,
    module: str,
    pair: Mapping[str, StoredTensor],
    target: Target,
    config: LoRAConfig,
    selected: bool,
) -> list[str]:
    """What is wrong with the factors of one module."""
    if not selected:
        return [f"{folder / CONFIG}: target_modules leaves out {module}, of which {WEIGHTS} has factors"]
    rank = config.rank_of(module)
    faults = []
    for factor, shape in (("A", (rank, target.in_features)), ("B", (target.out_features, rank))):
        tensor = pair.get(factor)
        if tensor is None:
            faults.append(
                f"{folder / WEIGHTS} lacks {_PREFIX}{module}.lora_{factor}.weight, which is selected"
            )
        elif tensor.shape != shape:
            faults.append(
                f"tensor {tensor.name} of {folder / WEIGHTS} does not fit: expected shape {list(shape)}, got "
                f"{list(tensor.shape)}; see whether the adapter is of this model, and of rank {rank}"
            )
        elif not tensor.dtype.is_floating_point:
            faults.append(f"tensor {tensor.name} of {folder / WEIGHTS} must hold floats, got {tensor.dtype}")
    return faults


def _too_large(folder: Path, field: str, rank: int, max_rank: int) -> str:
    return (
        f"{folder / CONFIG}: {field} asks for rank {rank}, above max_lora_rank={max_rank}: "
        f"start the engine with max_lora_rank={rank}"
    )


def _kinds(targets: Collection[str]) -> str:
    kinds: Sequence[str] = sorted({name.rpartition(".")[2] for name in targets})
    return ", ".join(kinds)
