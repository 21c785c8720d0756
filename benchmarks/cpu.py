"""On a CPU: what a step costs and how near memory that is, and decoding beside transformers and llama.cpp.

    python benchmarks/cpu.py --model MODEL.gguf [--dtypes float32,bfloat16,int8,gguf] [--tokens 64]

Everything runs in one process, on the same prompts, ways in turn. llama.cpp is there if
``llama-cpp-python`` is installed (``--llama-python`` names another interpreter that has it).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from specdecode import LLM, SamplingParams
from specdecode.bench.running import encode
from specdecode.bench.tasks import builtin_tasks
from specdecode.engine.plan import RowPlan, StepPlan
from specdecode.engine.request import RowDrafts
from specdecode.models.packing import weight_bytes

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
ROWS = (1, 2, 4, 6, 8, 16)
CONTEXT = 512
BATCH = 8


def options(dtype: str) -> dict[str, Any]:
    return {"quantization": dtype} if dtype in ("int8", "gguf") else {"dtype": dtype}


def read_rate(repeats: int = 12) -> float:
    """Best GB/s of reading 512 MB once with all threads."""
    data = torch.ones(1 << 27)

    def once() -> float:
        start = time.perf_counter()
        data.sum()
        return data.nbytes / (time.perf_counter() - start) / 1e9

    return max(once() for _ in range(repeats))


def cost_curve(model: str, repeats: int = 15, **keywords: Any) -> tuple[dict[int, float], int]:
    """Milliseconds of a target forward, by tokens of one row at context 512; and the bytes one reads."""
    with LLM(model, max_model_len=2048, device="cpu", **keywords) as llm:
        engine = llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        engine.add_request("row", {"prompt_token_ids": [1000 + i for i in range(CONTEXT)]}, params)
        for _ in range(3):
            engine.step()
        (request,) = engine.core.scheduler.running
        request.table.ensure(len(request.token_ids) + max(ROWS))
        decoder = engine.core.runner.model
        config = decoder.config
        kv = 2 * CONTEXT * config.num_layers * config.num_kv_heads * config.head_dim * decoder.dtype.itemsize
        # the embedding is looked up, not read; an output layer that shares it has a packed copy
        table = decoder.embed_tokens.weight.nbytes

        def forward(rows: int) -> float:
            drafts = RowDrafts((5,) * (rows - 1), tuple(range(-1, rows - 2)))
            start = time.perf_counter()
            engine.core.runner.forward(StepPlan([RowPlan(request, request.computed, 1, drafts)]))
            return (time.perf_counter() - start) * 1e3

        forward(1)
        times: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(repeats):
            for rows in ROWS:  # in turn, so that a slow spell of the machine hits all alike
                times[rows].append(forward(rows))
        return {rows: statistics.median(values) for rows, values in times.items()}, (
            weight_bytes(decoder) - table + kv
        )


class Ways:
    """Ways to decode the same prompts, timed in turn."""

    def __init__(self) -> None:
        self.by_name: dict[Hashable, Callable[[list[list[int]]], int]] = {}
        self.rounds: dict[Hashable, list[float]] = {}  #: tokens per second of each

    def rates(self, groups: list[list[list[int]]], rounds: int = 2) -> dict[Hashable, float]:
        """Tokens per second, prompts included, the median of the rounds. A group is one call."""
        self.rounds = {name: [] for name in self.by_name}
        for way in self.by_name.values():
            way(groups[0])
        for _ in range(rounds):
            seconds, tokens = dict.fromkeys(self.by_name, 0.0), dict.fromkeys(self.by_name, 0)
            for group in groups:
                for name, way in self.by_name.items():
                    start = time.perf_counter()
                    tokens[name] += way(group)
                    seconds[name] += time.perf_counter() - start
            for name, own in self.rounds.items():
                own.append(tokens[name] / seconds[name])
        return {name: statistics.median(own) for name, own in self.rounds.items()}


def ours(llm: LLM, tokens: int) -> Callable[[list[list[int]]], int]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def way(group: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in group], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return way


def theirs(model: Any, tokens: int, **extra: Any) -> Callable[[list[list[int]]], int]:
    @torch.inference_mode()
    def way(group: list[list[int]]) -> int:
        width = max(map(len, group))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in group])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in group])
        count = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **count, **extra)
        return (out.shape[1] - width) * len(group)

    return way


def prompts_by_task(llm: LLM, each: int) -> dict[str, list[list[int]]]:
    tokenizer = llm.get_tokenizer()
    return {
        task.name: [encode(tokenizer, prompt, chat=True) for prompt in task.prompts[:each]]
        for task in builtin_tasks()
    }


def beside_transformers(model: str, dtype: str, tokens: int) -> Table:
    """Batch 1 and one call of eight, plain and with prompt lookup."""
    from specdecode import models
    from transformers import AutoModelForCausalLM

    path = models.resolve_model(model).path
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    common = {"dtype": dtype, "max_model_len": 2048, "device": "cpu", "enable_prefix_caching": False}
    table = Table("batch", "way", "tokens/s", "to transformers", title=f"{dtype}, prompts included")
    with LLM(model, **common) as plain, LLM(model, speculative_config=NGRAM, **common) as ngram:
        prompts = prompts_by_task(plain, each=2)
        alone, together = Ways(), Ways()
        for ways in (alone, together):
            ways.by_name = {
                "transformers": theirs(reference, tokens),
                "specdec": ours(plain, tokens),
                "specdec ngram": ours(ngram, tokens),
            }
        alone.by_name["transformers prompt lookup"] = theirs(reference, tokens, prompt_lookup_num_tokens=5)
        everything = [ids for group in prompts.values() for ids in group]
        for batch, ways, groups in (
            (1, alone, [[group[0]] for group in prompts.values()]),
            (BATCH, together, [everything]),
        ):
            found = ways.rates(groups)
            for name, rate in found.items():
                table.add_row(str(batch), name, f"{rate:.1f}", f"{rate / found['transformers']:.2f}x")
    return table


#: Answers each line, a list of prompts, by how many tokens it made.
LLAMA_CPP = """
import json, sys
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
model, threads, tokens, drafts = sys.argv[1], *map(int, sys.argv[2:])
lookup = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
llm = llama_cpp.Llama(
    model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, draft_model=lookup,
    logits_all=bool(drafts), verbose=False,
)
for line in sys.stdin:
    made = 0
    for prompt in json.loads(line):
        llm.reset()
        for number, _ in enumerate(llm.generate(prompt, temp=0.0), 1):
            made += 1
            if number == tokens:
                break
    print(made, flush=True)
"""


@contextlib.contextmanager
def llama_cpp(python: str, model: str, tokens: int, drafts: int) -> Iterator[Callable[[Any], int]]:
    """llama.cpp on ``model``'s own weights in a process that waits between its turns; greedy."""
    command = [python, "-c", LLAMA_CPP, model, *map(str, (torch.get_num_threads(), tokens, drafts))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def way(group: list[list[int]]) -> int:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(group) + "\n")
            process.stdin.flush()
            if not (made := process.stdout.readline()):
                raise RuntimeError(f"llama.cpp ended with status {process.wait()}")
            return int(made)

        try:
            yield way
        finally:
            process.kill()


def code_edit(model: str, dtypes: Sequence[str], tokens: int, llama_python: str | None) -> Table:
    """The code-edit prompts alone, all in turn, plain and with prompt lookup; llama.cpp on its own file."""
    table = Table("engine", "way", "tokens/s", "spread", title="code edit, batch 1, prompts included")
    ways = Ways()
    with contextlib.ExitStack() as stack:
        for dtype in dtypes:
            common = {
                "max_model_len": 2048,
                "device": "cpu",
                "enable_prefix_caching": False,
                **options(dtype),
            }
            for name, config in (("plain", None), ("ngram", NGRAM)):
                llm = stack.enter_context(LLM(model, speculative_config=config, **common))
                ways.by_name[f"specdec {dtype}", name] = ours(llm, tokens)
        if llama_python:
            drafts = NGRAM["num_speculative_tokens"]
            for name, count in (("plain", 0), ("prompt lookup", drafts)):
                way = stack.enter_context(llama_cpp(llama_python, model, tokens, count))
                ways.by_name[f"llama.cpp {model.rsplit('/', 1)[-1]}", name] = way
        prompts = prompts_by_task(llm, each=4)["edit-code"]
        found = ways.rates([[ids] for ids in prompts], rounds=5)
        for (engine, name), rate in found.items():
            rounds = ways.rounds[engine, name]
            spread = (max(rounds) - min(rounds)) / statistics.median(rounds)
            table.add_row(engine, name, f"{rate:.1f}", f"{spread:.0%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    arguments = parser.parse_args()
    dtypes = arguments.dtypes.split(",")
    console = Console(width=100)

    title = f"ms a forward, by tokens of the row, context {CONTEXT}"
    curve = Table("dtype", *map(str, ROWS), "8 / 1", "MB read", "bound, ms", "of bound", title=title)
    rate = read_rate()
    for dtype in dtypes:
        times, read = cost_curve(arguments.model, **options(dtype))
        bound = read / rate / 1e6
        cells = [f"{times[rows]:.1f}" for rows in ROWS]
        curve.add_row(
            dtype, *cells, f"{times[8] / times[1]:.2f}", f"{read / 1e6:.0f}", f"{bound:.1f}",
            f"{times[1] / bound:.2f}x",
        )  # fmt: skip
    console.print(curve)
    console.print(f"read rate {rate:.1f} GB/s, {torch.get_num_threads()} threads")
    for dtype in dtypes:
        if "dtype" in options(dtype):  # transformers has no twin of the others
            console.print(beside_transformers(arguments.model, dtype, arguments.tokens))
    console.print(code_edit(arguments.model, dtypes, arguments.tokens, arguments.llama_python))


if __name__ == "__main__":
    main()
