"""Acceptance of suffix decoding by its options, and of prompt lookup beside it, without a model.

Both read nothing but text, so their acceptance can be found by replaying what a model wrote. ``record``
generates the texts of ``specdecode bench --dataset repetitive`` once, ``replay`` drafts for them in the order
in which they were written::

    python plugins/suffix/benchmarks/replay.py record --model MODEL --out texts.json
    python plugins/suffix/benchmarks/replay.py replay texts.json
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
from specdec_suffix.cache import PythonCache
from specdec_suffix.drafting import Draft, Limits

#: The text so far and the most that may be drafted -> the draft.
Rule = Callable[[Sequence[int], int], Draft]


@attrs.define
class Tally:
    """Counts of one replay."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    #: by matching tokens: drafts tried, those accepted, and what the counts had promised of them
    by_match: dict[int, list[float]] = attrs.field(factory=lambda: defaultdict(lambda: [0, 0, 0.0]))

    def add(self, other: Tally) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted

    def step(self, draft: Draft, following: Sequence[int]) -> int:
        """How many tokens a step writes: accepted drafts, and one of the target's own."""
        node, accepted = -1, 0
        while accepted + 1 < len(following):
            match = self.by_match[draft.match_len + accepted]
            children = [n for n, parent in enumerate(draft.parents) if parent == node]
            if children:
                before = draft.probs[node] if node >= 0 else 1.0
                match[0] += 1
                match[2] += draft.probs[children[0]] / before
            right = [child for child in children if draft.token_ids[child] == following[accepted]]
            if not right:
                break
            match[1] += right[0] == children[0]
            node, accepted = right[0], accepted + 1
        self.tokens += accepted + 1
        self.steps += 1
        self.drafted += len(draft.token_ids)
        self.accepted += accepted
        return accepted + 1

    @property
    def cells(self) -> list[str]:
        steps = max(1, self.steps)
        return [f"{self.tokens / steps:.2f}", f"{1 + self.drafted / steps:.2f}"]


def replay_suffix(texts: Sequence[dict], depth: int, limits: Limits, keep: bool) -> dict[str, Tally]:
    """Each text behind those before it; the first token of an output comes from the prompt's own step."""
    cache, tallies = PythonCache(depth, keep), defaultdict(Tally)
    for key, text in enumerate(texts):
        prompt, whole = text["prompt"], text["prompt"] + text["output"]
        cache.start(key, prompt)
        done = len(prompt) + 1
        cache.extend(key, whole[len(prompt) : done])
        while done < len(whole):
            most = min(limits.most, len(whole) - done - 1)
            draft = cache.speculate(key, whole[max(0, done - depth) : done], attrs.evolve(limits, most=most))
            count = tallies[text["task"]].step(draft, whole[done:])
            cache.extend(key, whole[done : done + count])
            done += count
        cache.stop(key)
    return tallies


def replay_ngram(texts: Sequence[dict], most: int) -> dict[str, Tally]:
    """specdec-ngram with its default windows."""
    from specdec_ngram.index import NgramIndex
    from specdec_ngram.proposer import continuation, trusted_length

    tallies: dict[str, Tally] = defaultdict(Tally)
    for text in texts:
        whole, done, index = text["prompt"] + text["output"], len(text["prompt"]) + 1, NgramIndex(2, 5)
        while done < len(whole):
            known = whole[:done]
            index.extend(known)
            match = index.match(known)
            draft = Draft()
            if match is not None:
                start, window = match
                length = min(most, len(whole) - done - 1, trusted_length(window, 5))
                ids = continuation(known, start, length) if length else []
                draft = Draft(ids, range(-1, len(ids) - 1), [1.0] * len(ids), float(len(ids)), window)
            done += tallies[text["task"]].step(draft, whole[done:])
    return tallies


def settings() -> Iterator[tuple[str, int, Limits, bool]]:
    """Name, depth, limits, and whether outputs are remembered."""
    default = Limits(most=24, factor=1.0, min_prob=0.1)
    yield "suffix", 24, default, True
    yield "suffix, its own text only", 24, default, False
    for most in (5, 10, 16):
        yield f"suffix, at most {most}", 24, attrs.evolve(default, most=most), True
    for depth in (12, 32, 48):
        yield f"suffix, depth {depth}", depth, attrs.evolve(default, most=depth), True
    for factor in (0.5, 2.0, 4.0):
        yield f"suffix, factor {factor}", 24, attrs.evolve(default, factor=factor), True
    for prob in (0.3, 0.5):
        yield f"suffix, probability {prob}", 24, attrs.evolve(default, min_prob=prob), True
    for factor in (1.0, 2.0):
        yield f"suffix, tree, factor {factor}", 24, attrs.evolve(default, factor=factor, tree=True), True


def table(texts: Sequence[dict]) -> None:
    """Tokens and rows a target step: what is written, and what the target computes for it."""
    tasks = sorted({text["task"] for text in texts})
    print("| | " + " | ".join(f"{task} | rows" for task in [*tasks, "all"]) + " |")
    print("|" + " --- |" * (3 + 2 * len(tasks)))

    def row(name: str, tallies: dict[str, Tally]) -> None:
        every = Tally()
        for tally in tallies.values():
            every.add(tally)
        cells = [cell for task in tasks for cell in tallies[task].cells]
        print(f"| {name} | " + " | ".join([*cells, *every.cells]) + " |")

    for most in (3, 5, 10, 16):
        row(f"ngram, {most}", replay_ngram(texts, most))
    for name, *setting in settings():
        row(name, replay_suffix(texts, *setting))


def trust(texts: Sequence[dict]) -> None:
    """How often the likeliest next token came, beside what counts had promised, by matching tokens."""
    _, *default = next(settings())
    match: dict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for tally in replay_suffix(texts, *default).values():
        for length, counts in tally.by_match.items():
            match[length] = [one + other for one, other in zip(match[length], counts, strict=True)]
    print("\n| matching tokens | drafts | accepted | promised |\n| --- | --- | --- | --- |")
    for length, (tried, right, promised) in sorted(match.items()):
        if tried:
            print(f"| {length} | {tried} | {right / tried:.2f} | {promised / tried:.2f} |")


def record(model: str, max_tokens: int, out: Path) -> None:
    """Generate the repetitive tasks greedily, and store token ids."""
    from specdecode import LLM, SamplingParams, TokensPrompt
    from specdecode.bench.running import encode
    from specdecode.bench.tasks import builtin_tasks

    llm = LLM(model, dtype="float32", max_num_seqs=1, speculative_config={"method": "suffix"})
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    texts = []
    for task in builtin_tasks("repetitive"):
        for prompt in task.prompts:
            ids = encode(llm.get_tokenizer(), prompt)
            (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], params)
            tokens = list(output.outputs[0].token_ids)
            texts.append({"task": task.name, "id": prompt.id, "prompt": ids, "output": tokens})
    out.write_text(json.dumps(texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="generate the texts")
    recording.add_argument("--model", required=True)
    recording.add_argument("--max-tokens", type=int, default=192)
    recording.add_argument("--out", type=Path, required=True)
    replaying = commands.add_parser("replay", help="compare options over the texts")
    replaying.add_argument("texts", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.model, arguments.max_tokens, arguments.out)
        return
    texts = json.loads(arguments.texts.read_text())
    table(texts)
    trust(texts)


if __name__ == "__main__":
    main()
