"""A tiny SmolVLM: a vision tower, a connector and the text model of :mod:`.tiny`, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..heads.untrained import RandomWeights
from .tiny import BOS, EOS, PAD, tiny_checkpoint

#: The placeholder, and what is written around it.
IMAGE, FENCE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
#: Their ids, in this order: behind the 256 bytes and the three special tokens of :mod:`.tiny`.
IMAGE_ID, FENCE_ID, GLOBAL_ID = 259, 260, 261

CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_vision_checkpoint(
    path: str | Path, *, family: str = "smolvlm", seed: int = 0, tile: int = 32, **text_overrides: Any
) -> Path:
    """Write a checkpoint whose images are at most 2 x 2 tiles and the whole, each of 4 vectors.

    Args:
        path: directory, made if it is not there.
        family: ``smolvlm`` or ``idefics3``.
        seed: of the weights.
        tile: pixels of a tile's side, of which a patch takes 8.
        text_overrides: further arguments of :func:`~specdecode.testing.tiny.tiny_checkpoint`.

    Returns:
        ``path``.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    text = tiny_checkpoint(Path(path), seed=seed, **text_overrides)
    fields = json.loads((text / "config.json").read_text("utf-8"))
    tensors = {
        name.replace("model.", "model.text_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[family]
    config = transformers.AutoConfig.for_model(
        family,
        architectures=[f"{name}ForConditionalGeneration"],
        image_token_id=IMAGE_ID,
        scale_factor=2,
        tie_word_embeddings=fields["tie_word_embeddings"],
        dtype="float32",
        text_config={key: value for key, value in fields.items() if key != "architectures"},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": tile,
            "patch_size": 8,
        },
    )
    config.save_pretrained(text)
    with torch.device("meta"):
        whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    random = RandomWeights(seed + 1)
    for own, parameter in whole.named_parameters():
        if "vision_model" in own or "connector" in own:
            norm = "norm" in own and own.endswith("weight")
            scale = 4.0 if "patch_embedding" in own or "proj.weight" in own else 1.0  # so that pixels count
            tensors[own] = random.norm(*parameter.shape) if norm else random.normal(*parameter.shape) * scale
    save_file(tensors, text / "model.safetensors", metadata={"format": "pt"})
    _write_processor(text, name, tile)
    _write_tokenizer(text)
    return text


def tiny_image(seed: int = 0, width: int = 60, height: int = 40) -> Any:
    """A ``PIL.Image.Image`` of coloured noise; of this size it becomes 2 x 2 tiles and the whole."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def _write_processor(path: Path, name: str, tile: int) -> None:
    fields = {
        "do_convert_rgb": True,
        "do_image_splitting": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": f"{name}ImageProcessor",
        "max_image_size": {"longest_edge": tile},
        "size": {"longest_edge": 2 * tile},
        "resample": 1,
        "rescale_factor": 1 / 255,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(path: Path) -> None:
    """The one that is there, with three of its extra tokens named and special."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = path / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    vocab = content["model"]["vocab"]
    by_id = {index: token for token, index in vocab.items()}
    for index, token in ((IMAGE_ID, IMAGE), (FENCE_ID, FENCE), (GLOBAL_ID, GLOBAL)):
        del vocab[by_id[index]]
        vocab[token] = index
        content["added_tokens"].append(
            {
                "id": index, "content": token, "special": True, "normalized": False,
                "lstrip": False, "rstrip": False, "single_word": False,
            }
        )  # fmt: skip
    file.write_text(json.dumps(content), encoding="utf-8")
    length = AutoTokenizer.from_pretrained(path).model_max_length
    PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        pad_token="<|pad|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
    assert (PAD, BOS, EOS) == (0, 1, 2)
