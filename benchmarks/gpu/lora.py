"""What adapters cost on a GPU: the 8B shape without room for any, with room, with one and with eight.

    python benchmarks/gpu/lora.py --budget 90 --json lora.json
    python benchmarks/gpu/lora.py --shape DIRECTORY --device cpu --dtype float32 --new-tokens 8 --context 16

Weights and adapters are random, all seven modules of every layer adapted at one rank; requests greedy with
stop conditions off. A token's time is that of N tokens less that of one, so prompts do not count.

    kernels   what makes the additions of one decoder layer, captured, by tokens and adapters
    engines   ms a token by batch: no room for adapters; one adapter; one for each row; none asked for
    checks    tokens: rows without an adapter against the engine without room, rows beside other neighbours
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from engines import SHAPE, Engines, without_advice
from safetensors.torch import save_file
from specdec_kernels.lora import lora_delta
from specdecode import LLM, LoRARequest, SamplingParams
from specdecode.bench.report import environment_of
from startup import shapes
from tables import Column, table
from timing import Prompts, Workload, captured, decode_row, device_ms, random_prompts

#: Adapters in the batch of most.
MANY = 8
KERNELS = (
    Column("tokens", "tokens"),
    Column("adapters", "adapters"),
    Column("layer_us", "us a layer", ".1f"),
    Column("step_ms", "ms a step", ".3f"),
)
ENGINES = (
    Column("what", "what"),
    Column("batch", "batch"),
    Column("ms_per_token", "ms/token", ".3f"),
    Column("tokens_per_s", "tokens/s", ".1f"),
    Column("overhead", "over no room", "+.1%"),
    Column("spread", "spread", ".1%"),
)
CHECKS = (Column("check", "check"), Column("equal", "equal"), Column("of", "of"))


@attrs.frozen
class Asking:
    """An engine whose requests ask for adapters in turn, as :func:`timing.decode_row` drives it."""

    llm: LLM
    requests: Sequence[LoRARequest]

    def generate(self, prompts: Prompts, params: SamplingParams, *, use_tqdm: bool) -> Any:
        asked = (
            [self.requests[row % len(self.requests)] for row in range(len(prompts))]
            if self.requests
            else None
        )
        return self.llm.generate(prompts, params, use_tqdm=use_tqdm, lora_request=asked)

    def get_metrics(self) -> Any:
        return self.llm.get_metrics()


def write_adapters(
    folder: Path, config: Mapping[str, Any], rank: int, dtype: torch.dtype, device: str
) -> list[Path]:
    """``MANY`` adapters of random factors for all linear layers, as PEFT writes them."""
    modules = [
        (name.removesuffix(".weight"), shape)
        for name, shape in shapes(dict(config))
        if name.endswith("_proj.weight")
    ]
    paths = []
    for seed in range(MANY):
        generator = torch.Generator(device).manual_seed(seed)
        tensors = {}
        for module, (outputs, inputs) in modules:
            for factor, shape, size in (("A", (rank, inputs), inputs**-0.5), ("B", (outputs, rank), 0.02)):
                values = torch.randn(shape, generator=generator, device=device) * size
                tensors[f"base_model.model.{module}.lora_{factor}.weight"] = values.to(dtype).cpu()
        path = folder / f"adapter-{seed}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        names = sorted({module.rpartition(".")[2] for module, _ in modules})
        fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(fields))
        paths.append(path)
    return paths


def kernel_rows(options: argparse.Namespace, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Device time of what makes the additions of one layer's four products."""
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    products = [
        (hidden, (queries, keys, keys)),
        (queries, (hidden,)),
        (hidden, (inner, inner)),
        (inner, (hidden,)),
    ]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=options.dtype, device=options.device)

    stacks = [
        (randn(MANY, len(parts) * options.rank, inputs), randn(MANY, sum(parts), options.rank), parts)
        for inputs, parts in products
    ]
    found = []
    for tokens in (1, 8, 48):
        x = {inputs: randn(tokens, inputs) for inputs, _ in products}
        for adapters in (1, MANY):
            slots = torch.arange(tokens, device=options.device) % adapters

            def layer(x: Any = x, slots: torch.Tensor = slots) -> None:
                for a, b, parts in stacks:
                    lora_delta(x[a.shape[2]], a, b, slots, parts)

            ms = device_ms(captured(layer))
            found.append(
                {"tokens": tokens, "adapters": adapters, "layer_us": ms * 1e3, "step_ms": ms * layers}
            )
    return found


def engine_rows(
    llm: LLM, what: str, requests: Sequence[LoRARequest], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row a batch size."""
    found = []
    for batch in options.batches:
        if len(requests) > batch:
            continue
        work = Workload(
            batch=batch,
            context=options.context,
            new_tokens=options.new_tokens,
            repeats=options.repeats,
            prompts=lambda batch, seed: random_prompts(
                batch, options.context, llm.llm_engine.target.vocab_size, seed
            ),
        )
        found.append({"what": what, **decode_row(Asking(llm, requests), work)})  # type: ignore[arg-type]
    return found


def outputs_of(
    llm: LLM, requests: Sequence[LoRARequest | None], options: argparse.Namespace
) -> list[list[int]]:
    prompts = random_prompts(len(requests), options.context, llm.llm_engine.target.vocab_size, 99)
    params = SamplingParams(temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True, detokenize=False)
    given = list(requests) if any(requests) else None
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, params, use_tqdm=False, lora_request=given)
    ]


def checks(
    llm: LLM, plain: list[list[int]], requests: Sequence[LoRARequest], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Tokens that must be equal, however the bits of bfloat16 fall."""
    mixed: list[LoRARequest | None] = [one if row % 2 else None for row, one in enumerate(requests)]
    together = outputs_of(llm, mixed, options)
    others = outputs_of(llm, [one or requests[0] for one in mixed], options)
    none = [row for row, one in enumerate(mixed) if one is None]
    some = [row for row, one in enumerate(mixed) if one is not None]
    return [
        {
            "check": "rows without an adapter, beside others: as without room",
            "equal": sum(together[row] == plain[row] for row in none),
            "of": len(none),
        },
        {
            "check": "rows with an adapter, beside other neighbours",
            "equal": sum(together[row] == others[row] for row in some),
            "of": len(some),
        },
        {
            "check": "rows that an adapter changed",
            "equal": sum(together[row] != plain[row] for row in some),
            "of": len(some),
        },
    ]


def main() -> None:
    options = _arguments()
    started = time.perf_counter()
    config = json.loads((options.shape / "config.json").read_text())
    report: dict[str, Any] = {"environment": environment_of(options.device, {}), "sections": {}}

    def store(section: str, title: str, columns: Any, rows: list[dict[str, Any]]) -> None:
        report["sections"].setdefault(section, []).extend(rows)
        report["seconds"] = time.perf_counter() - started
        if rows:
            print(table(title, columns, rows), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    def left() -> float:
        return options.budget - (time.perf_counter() - started)

    store("kernels", f"Additions of adapters of rank {options.rank}", KERNELS, kernel_rows(options, config))
    keywords = {
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": options.device,
        "max_model_len": options.context + options.new_tokens + 64,
        "gpu_memory_utilization": 0.85,
    }
    most = max(MANY, *options.batches)
    with tempfile.TemporaryDirectory() as folder, without_advice():
        engines = Engines(model=str(options.shape), keywords=keywords)
        llm = engines.get("no room", max_num_seqs=most)
        plain_rows = engine_rows(llm, "no room for adapters", (), options)
        title = f"{options.shape.name}, rank {options.rank}, {report['environment'].get('device_name', '')}"

        def compare(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                beside = next(other for other in plain_rows if other["batch"] == row["batch"])
                row["overhead"] = row["ms_per_token"] / beside["ms_per_token"] - 1
            store("engines", title, ENGINES, rows)

        compare(plain_rows)
        plain = outputs_of(llm, [None] * MANY, options)
        engines.close()
        paths = write_adapters(Path(folder), config, options.rank, options.dtype, options.device)
        requests = [LoRARequest(f"adapter-{i}", i + 1, str(path)) for i, path in enumerate(paths)]
        room = {"enable_lora": True, "max_loras": MANY, "max_lora_rank": options.rank}
        engines = Engines(model=str(options.shape), keywords=keywords | room)
        llm = engines.get("room", max_num_seqs=most)
        for what, asked in (
            ("one adapter", requests[:1]),
            ("an adapter a row", requests),
            ("none asked for", ()),
        ):
            if left() < 10:
                print(f"{what}: left out, {left():.0f} s of the budget are left", flush=True)
                continue
            compare(engine_rows(llm, what, asked, options))
        store("checks", "Tokens that must be equal, and not", CHECKS, checks(llm, plain, requests, options))
        engines.close()
    print(f"{time.perf_counter() - started:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=SHAPE, help="folder with a config.json")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each; the median counts")
    parser.add_argument("--budget", type=float, default=90, help="seconds; what would not fit is left out")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write everything measured here, section by section")
    return parser.parse_args()


if __name__ == "__main__":
    main()
