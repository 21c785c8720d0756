"""Writes the training prompts that are not the target's own: JSON lines, the same on every run of one Python.

    python heads/smollm2/make_prompts.py prompts.jsonl

They are made of the standard library of the Python that runs this (PSF licence: its texts are read, none is
kept here) and of word problems from the templates below. Held-out prompts come from other sources.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

_MODULES_LEFT_OUT = ("test", "idlelib", "lib2to3", "site-packages", "turtledemo", "pydoc_data", "encodings")
_EACH = 700

_SUMMARISE = (
    "Summarize the following text in a few sentences.\n\n{}",
    "What are the main points of this text?\n\n{}",
    "Write a short summary of this documentation.\n\n{}",
)
_EDIT = (
    "Rewrite this Python function with type hints. Return the whole function.\n\n```python\n{}\n```",
    "Add a docstring to this Python function and change nothing else.\n\n```python\n{}\n```",
    "Rename the first parameter of this function to `value`. Return the whole code.\n\n```python\n{}\n```",
    "Add error handling to this Python function. Return the whole function.\n\n```python\n{}\n```",
)
_EXPLAIN = (
    "Explain what this Python function does.\n\n```python\n{}\n```",
    "What does the following code do, step by step?\n\n```python\n{}\n```",
)
_WRITE = (
    "Write a Python function `{name}({args})`. {doc}",
    'Complete this Python function:\n\n```python\ndef {name}({args}):\n    """{doc}"""\n```',
)
_PROBLEMS = (
    "{a} has {m} {things}. {b} gives {a} {n} more, and {a} gives {k} of them away. How many are left?",
    "A box holds {m} {things}. How many {things} are there in {n} boxes, if {k} of them are broken?",
    "{a} walks {m} km every day for {n} days and {b} walks {k} km a day. How many km do they walk in all?",
    "{a} earns ${m} an hour and works {n} hours a day. How much does {a} earn in {k} days?",
    "A shop sells {things} at ${k} each. On Monday it sells {m} and on Tuesday {n} more than on Monday. "
    "How much money does it take in both days?",
    "{a} reads {k} pages of a book of {m} pages every day. How many pages are left after {n} days?",
    "There are {m} {things} on a table. {a} takes half of them and {b} takes {k}. How many are left?",
    "{a} is {n} years older than {b}, who is {k}. How old will {a} be in {m} years?",
)
_NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Femi", "Grace", "Hiro", "Ines", "Jonas", "Kim", "Lena")
_THINGS = ("apples", "marbles", "pencils", "stamps", "cookies", "books", "tickets", "shells", "cards", "eggs")


def main(path: str) -> None:
    """Write the prompts to ``path``."""
    draw = random.Random(0)
    prompts = [*_of_the_library(draw), *_problems(draw)]
    draw.shuffle(prompts)
    lines = [json.dumps({"prompt": prompt, "task": task}) for task, prompt in prompts]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {path}")


def _of_the_library(draw: random.Random) -> Iterator[tuple[str, str]]:
    texts: list[str] = []
    functions: list[tuple[ast.FunctionDef, str]] = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if any(part in _MODULES_LEFT_OUT for part in file.relative_to(root).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
            continue  # a few files of the library are no UTF-8, on purpose
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                doc = ast.get_docstring(node) or ""
                if 400 <= len(doc) <= 1600:
                    texts.append(doc)
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
                functions.append((node, code))
    yield from (("summarise", draw.choice(_SUMMARISE).format(text)) for text in _some(draw, texts))
    short = [code for _, code in functions if 150 <= len(code) <= 1200]
    yield from (("edit", draw.choice(_EDIT).format(code)) for code in _some(draw, short))
    yield from (("explain", draw.choice(_EXPLAIN).format(code)) for code in _some(draw, short))
    told = [(node, ast.get_docstring(node) or "") for node, _ in functions]
    for node, doc in _some(draw, [(node, doc) for node, doc in told if 30 <= len(doc) <= 400]):
        args = ", ".join(arg.arg for arg in node.args.args if arg.arg != "self")
        yield "write", draw.choice(_WRITE).format(name=node.name, args=args, doc=doc)


def _some(draw: random.Random, items: list) -> list:
    return draw.sample(items, min(_EACH, len(items)))


def _problems(draw: random.Random) -> Iterator[tuple[str, str]]:
    for _ in range(_EACH):
        a, b = draw.sample(_NAMES, 2)
        m, n, k = draw.randint(20, 90), draw.randint(2, 12), draw.randint(2, 9)
        things = draw.choice(_THINGS)
        yield "problem", draw.choice(_PROBLEMS).format(a=a, b=b, m=m, n=n, k=k, things=things)


if __name__ == "__main__":
    main(sys.argv[1])
