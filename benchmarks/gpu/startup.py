"""How long an 8B model takes from its files to its first token, by stage.

    python benchmarks/gpu/startup.py --json startup.json
    python benchmarks/gpu/startup.py --layers 4 --directory /scratch     # smaller, elsewhere

Writes a checkpoint of the Llama-3.1-8B shape (16 GB of random bfloat16) into a directory and starts an
engine on it in a process of its own, several times: as it comes (kernels are compiled, files are in the
page cache), again with the kernels compiled, and with the files dropped from the page cache. What was
written is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tables import Column, table

SHAPE = Path(__file__).parent / "llama-8b-shape" / "config.json"
#: Bytes of a weight file, as published checkpoints are cut.
_SHARD_BYTES = 5 << 30
#: Standard deviation of the weights: logits that are neither flat nor infinite.
_STD = 0.02

#: What a run is called -> whether the files are dropped from the page cache before it.
RUNS = {"kernels not compiled": False, "kernels compiled": False, "files not in the page cache": True}


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a Llama checkpoint."""
    hidden, inner, vocab = (config[f"{name}_size"] for name in ("hidden", "intermediate", "vocab"))
    heads, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (heads, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_checkpoint(directory: Path, layers: int | None) -> int:
    """A checkpoint of the shape, in shards with an index; its bytes."""
    from safetensors.torch import save_file

    config = json.loads(SHAPE.read_text("utf-8"))
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes(config):
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        values.normal_(1.0 if len(shape) == 1 else 0.0, _STD, generator=generator)
        shard[name] = values.cpu()
        total += values.nbytes
        if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return total


def forget(directory: Path) -> None:
    """Drop the files from the page cache; needs no rights but to read them."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(directory: Path, keywords: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine here and now: seconds by stage, in order."""
    begun = time.perf_counter()
    from specdecode import LLM, SamplingParams
    from specdecode.api import assemble, memory

    stages: list[dict[str, Any]] = [{"stage": "imports", "seconds": time.perf_counter() - begun}]

    @contextlib.contextmanager
    def timed(doing: str, *args: Any, **options: Any) -> Iterator[memory.Growth]:
        before = time.perf_counter()
        with memory.stage(doing, *args, **options) as growth:
            yield growth
        _wait()
        stages.append({"stage": doing, "seconds": time.perf_counter() - before})

    begun = time.perf_counter()
    with mock.patch.object(assemble, "stage", timed):
        llm = LLM(str(directory), skip_tokenizer_init=True, **keywords)
    whole = time.perf_counter() - begun
    stages.append({"stage": "the rest", "seconds": whole - sum(s["seconds"] for s in stages[1:])})
    stages.append({"stage": "LLM(...) as a whole", "seconds": whole})
    prompt = {"prompt_token_ids": list(range(100, 612))}
    for name in ("first token of 512", "the same again"):
        begun = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        stages.append({"stage": name, "seconds": time.perf_counter() - begun})
    llm.shutdown()
    return stages


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def start_elsewhere(directory: Path, options: argparse.Namespace, kernels: Path) -> list[dict[str, Any]]:
    """:func:`start` in a new process that keeps its compiled kernels in ``kernels``."""
    command = [sys.executable, __file__, "--start", str(directory), "--engine", options.engine]
    environment = os.environ | {"TRITON_CACHE_DIR": str(kernels)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    stages: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where to write the checkpoint; none: a temporary one")
    parser.add_argument("--layers", type=int, help="of the model; none: 32")
    parser.add_argument("--engine", default='{"max_model_len": 8192}', help="keywords of LLM, as JSON")
    parser.add_argument("--runs", default=",".join(RUNS), help="which runs, by name")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start, json.loads(options.engine))))
        return

    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        directory, kernels = Path(scratch) / "model", Path(scratch) / "kernels"
        directory.mkdir()
        begun = time.perf_counter()
        size = write_checkpoint(directory, options.layers)
        print(f"wrote {size / 2**30:.2f} GiB in {time.perf_counter() - begun:.1f} s", flush=True)
        for name in options.runs.split(","):
            if RUNS[name]:
                forget(directory)
            runs[name] = start_elsewhere(directory, options, kernels)
            title = f"start-up, {name}"
            columns = (Column("stage", "stage"), Column("seconds", "seconds", ".2f"))
            print(table(title, columns, runs[name]), flush=True)
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        result = {"device": device, "bytes": size, "engine": json.loads(options.engine), "runs": runs}
        options.json.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
