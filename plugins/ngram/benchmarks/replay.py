"""Which match to copy, which windows, how many tokens: measured by replaying texts, without a model.

Prompt lookup reads nothing but text, so its acceptance under greedy decoding can be found by
replaying what the model wrote. ``record`` generates the texts once with the engine (without
speculation), ``replay`` runs every rule over them::

    python plugins/ngram/benchmarks/replay.py record --model MODEL --out texts.json
    python plugins/ngram/benchmarks/replay.py replay texts.json

A rule is a name of ``RULES`` (which of several occurrences wins, and what is proposed when the
match runs into the end of the text). The search is by brute force, so that rules can be compared
that the plugin's index does not offer.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec_ngram.proposer import trusted_length

Text = Sequence[int]
#: continuation of a match that starts at ``start``, at most ``k`` tokens
Rule = Callable[[Text, list[int], int], list[int]]


def _copy(text: Text, start: int, k: int) -> list[int]:
    return list(text[start : start + k])


def _cycle(text: Text, start: int, k: int) -> list[int]:
    period = len(text) - start
    return [text[start + i % period] for i in range(k)]


def _full(text: Text, starts: list[int], k: int) -> int:
    whole = [start for start in starts if start + k <= len(text)]
    return whole[-1] if whole else starts[0]


#: ``starts`` are the positions after each earlier occurrence, ascending.
RULES: dict[str, Rule] = {
    "first": lambda text, starts, k: _copy(text, starts[0], k),
    "recent": lambda text, starts, k: _copy(text, starts[-1], k),
    "recent-full": lambda text, starts, k: _copy(text, _full(text, starts, k), k),
    "recent-cycle": lambda text, starts, k: _cycle(text, starts[-1], k),
}
CHOSEN = "recent-cycle"


#: rule, shortest and longest window, tokens a draft, whether short matches draft less
SETTINGS: dict[str, list[tuple[str, int, int, int, bool]]] = {
    "Rules": [(rule, 2, 5, k, False) for k in (3, 5, 10) for rule in RULES],
    "Windows": [
        (CHOSEN, shortest, longest, 5, False)
        for shortest, longest in itertools.product((1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 8))
        if shortest <= longest
    ],
    "Lengths": [(CHOSEN, 2, 5, k, trust) for trust in (False, True) for k in (1, 2, 3, 4, 5, 6, 8, 10, 16)],
}


@dataclass
class Tally:
    """Counts of one replay; every property is a mean over all of its texts."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    by_window: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(1, self.drafts)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / max(1, self.drafted)

    @property
    def rows_per_step(self) -> float:
        """Tokens the target computes a step: what drafts cost where compute is not free."""
        return 1 + self.drafted / self.steps


def replay(
    texts: Iterable[dict], rule: Rule, shortest: int, longest: int, k: int, trust: bool = False
) -> Tally:
    """Decode each text with drafts of ``rule``; the first token comes from the prompt's own step."""
    tally = Tally()
    for text in texts:
        prompt, output = text["prompt"], text["output"]
        whole, done = list(prompt) + list(output), len(prompt) + 1
        occurrences = Occurrences(shortest, longest)
        while done < len(whole):
            known = whole[:done]
            window, starts = occurrences.find(known)
            limit = min(k, len(whole) - done - 1)
            if trust:
                limit = min(limit, trusted_length(window, longest))
            drafts = rule(known, starts, limit) if starts and limit else []
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == whole[done + accepted]:
                accepted += 1
            done += accepted + 1
            tally.steps += 1
            tally.tokens += accepted + 1
            if drafts:
                tally.drafts += 1
                tally.drafted += len(drafts)
                tally.accepted += accepted
                counts = tally.by_window.setdefault(window, [0, 0])
                counts[0] += len(drafts)
                counts[1] += accepted
    return tally


class Occurrences:
    """All occurrences of every n-gram of one growing text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._windows = range(longest, shortest - 1, -1)
        self._starts: dict[tuple[int, ...], list[int]] = {}
        self._end = 0

    def find(self, text: Text) -> tuple[int, list[int]]:
        """The longest window whose n-gram occurred before, and the positions after each occurrence."""
        for end in range(self._end + 1, len(text)):
            for n in self._windows:
                if n <= end:
                    self._starts.setdefault(tuple(text[end - n : end]), []).append(end)
        self._end = len(text) - 1
        for n in self._windows:
            if n < len(text) and (starts := self._starts.get(tuple(text[-n:]))):
                return n, starts
        return 0, []


def record(model: str, max_tokens: int, out: Path) -> None:
    """Generate the built-in tasks greedily and at temperature 0.9 (top_p 0.9), and store token ids."""
    from specdecode import LLM, SamplingParams, TokensPrompt
    from specdecode.bench.running import encode
    from specdecode.bench.tasks import builtin_tasks

    llm = LLM(model, dtype="float32")
    cases = [(task, prompt) for task in builtin_tasks() for prompt in task.prompts]
    ids = [encode(llm.get_tokenizer(), prompt) for _, prompt in cases]
    texts = []
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=1, max_tokens=max_tokens)
        outputs = llm.generate([TokensPrompt(prompt_token_ids=i) for i in ids], params)
        for (task, prompt), i, output in zip(cases, ids, outputs, strict=True):
            texts.append(
                {
                    "task": task.name,
                    "id": prompt.id,
                    "temperature": temperature,
                    "prompt": i,
                    "output": list(output.outputs[0].token_ids),
                }
            )
    out.write_text(json.dumps(texts))


def table(texts: list[dict], settings: Iterable[tuple[str, int, int, int, bool]]) -> None:
    """Print tokens per target step of each setting and task, and what all tasks together cost."""
    tasks = sorted({text["task"] for text in texts})
    print(
        "| rule | min | max | k | trust | "
        + " | ".join(tasks)
        + " | all | acceptance length | rate | rows a step |"
    )
    print("|" + " --- |" * (9 + len(tasks)))
    for rule, shortest, longest, k, trust in settings:
        setting = (RULES[rule], shortest, longest, k, trust)
        cells = [replay((t for t in texts if t["task"] == task), *setting).tokens_per_step for task in tasks]
        every = replay(texts, *setting)
        figures = [
            *cells, every.tokens_per_step, every.acceptance_length, every.acceptance_rate, every.rows_per_step
        ]  # fmt: skip
        print(
            f"| {rule} | {shortest} | {longest} | {k} | {'yes' if trust else 'no'} | "
            + " | ".join(f"{x:.2f}" for x in figures)
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="generate the texts")
    recording.add_argument("--model", required=True)
    recording.add_argument("--max-tokens", type=int, default=256)
    recording.add_argument("--out", type=Path, required=True)
    replaying = commands.add_parser("replay", help="compare rules, windows and lengths over the texts")
    replaying.add_argument("texts", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.model, arguments.max_tokens, arguments.out)
        return
    stored = json.loads(arguments.texts.read_text())
    for temperature in sorted({text["temperature"] for text in stored}):
        texts = [text for text in stored if text["temperature"] == temperature]
        tokens = sum(len(text["output"]) for text in texts)
        print(f"\n### Temperature {temperature}: {len(texts)} texts, {tokens} tokens")
        for title, settings in SETTINGS.items():
            print(f"\n{title}\n")
            table(texts, settings)
        print("\nAcceptance rate by the window that matched\n")
        by_window = replay(texts, RULES[CHOSEN], 1, 5, 5).by_window
        print("| " + " | ".join(f"{n} tokens" for n in sorted(by_window)) + " |")
        print("|" + " --- |" * len(by_window))
        rates = (accepted / drafted for _, (drafted, accepted) in sorted(by_window.items()))
        print("| " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")


if __name__ == "__main__":
    main()
