"""Finding a model: a directory, a hub id in the offline cache, or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from specdecode.contract import ConfigError

from .gguf import convert_gguf, gguf_source
from .vision.config import VISION_FAMILIES, VisionConfig

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]

#: Model types that transformers has no config for -> the one whose fields they have.
_READ_AS = {"mimo": "qwen2"}


@attrs.frozen(kw_only=True)
class ModelFiles:
    """A model on disk, its config read and no weight yet."""

    name: str  #: as the user wrote it
    path: Path  #: directory of config, tokenizer and safetensors
    architecture: str  #: for example "LlamaForCausalLM"
    hf_config: Any = attrs.field(repr=False)  #: transformers config object
    gguf: Path | None = None  #: the GGUF file that ``path`` was converted from
    trust_remote_code: bool = False
    vision: VisionConfig | None = None  #: it takes images; all the above is of its text model

    @property
    def source(self) -> Literal["safetensors", "gguf"]:
        """Format of the weights as the user gave them."""
        return "safetensors" if self.gguf is None else "gguf"


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    trust_remote_code: bool = False,
) -> ModelFiles:
    """Find ``model`` and read its config; a GGUF file is converted at its first use, which takes a while.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file (or a directory with one and no config),
            or the hub id of a model in the offline cache.
        revision: of a hub id.
        load_format: "auto", "safetensors", "gguf", or "dummy" (random weights: a config is enough).
        trust_remote_code: whether code in the checkpoint may run to read its config.

    Raises:
        ConfigError: there is no such model, or its config cannot be read.
    """
    if load_format not in get_args(LoadFormat):
        raise ConfigError(
            f"load_format must be one of {', '.join(get_args(LoadFormat))}, got {load_format!r}"
        )
    location = _locate(str(model), revision)
    gguf = _gguf_file(location, load_format)
    if gguf is not None:
        location = convert_gguf(gguf)
    else:
        gguf = gguf_source(location)
    config = _read_config(location, trust_remote_code)
    architecture, vision = _architecture(config, location), None
    if architecture in VISION_FAMILIES:
        vision = VisionConfig(architecture, config)
        config = vision.text_config()
        architecture = _architecture(config, location)
    return ModelFiles(
        name=str(model),
        path=location,
        architecture=architecture,
        hf_config=config,
        gguf=gguf,
        trust_remote_code=trust_remote_code,
        vision=vision,
    )


def _locate(model: str, revision: str | None) -> Path:
    path = Path(model)
    try:
        path = path.expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # no such home, too long a name
        raise ConfigError(f"model {model!r} is no path that can be looked up ({error})") from error
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix == ".gguf":
        raise ConfigError(
            f"model {model!r} does not exist; give a directory with config.json or a .gguf file"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ConfigError(
            f"model {model!r} is no file or directory here and not in the hub's offline cache{at}; "
            f"give a directory or a .gguf file, or fetch it first with `hf download {model}`"
        ) from error


def _gguf_file(location: Path, load_format: str) -> Path | None:
    """The GGUF file to convert, or None if ``location`` is a directory with a config."""
    if location.is_file():
        if location.suffix != ".gguf":
            raise ConfigError(f"model {str(location)!r} is a file but no .gguf; give its directory")
        if load_format == "safetensors":
            raise ConfigError(f"load_format 'safetensors' does not fit the GGUF file {location}; use 'auto'")
        return location
    if load_format != "gguf" and (location / "config.json").is_file():
        return None
    found = sorted(location.glob("*.gguf"))
    if load_format == "safetensors" or not found:
        missing = "config.json" if load_format != "gguf" else ".gguf file"
        raise ConfigError(f"model directory {location} has no {missing}; is it the right directory?")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"model directory {location} has several GGUF files ({names}); name one of them")
    return found[0]


def _read_config(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not trust_remote_code and (model_type := _READ_AS.get(fields.get("model_type"))):
            fields = {key: value for key, value in fields.items() if key not in ("model_type", "auto_map")}
            return AutoConfig.for_model(model_type, **fields)
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers documents no set of errors for what a config may hold
        raise ConfigError(f"{path / 'config.json'} cannot be read: {error}") from error


def _architecture(config: Any, path: Path) -> str:
    if config.architectures:
        return str(config.architectures[0])
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise ConfigError(
            f"{path / 'config.json'} names no architecture and model_type {config.model_type!r} "
            'is no causal language model; add "architectures"'
        )
    return str(name)
