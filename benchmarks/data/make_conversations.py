"""Writes conversations.jsonl: a model writes something, and is then asked to write it again with a change.

    python benchmarks/data/make_conversations.py --model SmolLM2-135M-Instruct.Q4_1.gguf

What a user says is written here; what the assistant says are the model's own greedy answers, each behind
all that was said before. So the first answer of a conversation is new, and those behind it repeat what the
model itself wrote, as in work on one file, with one form or in an agent's loop. A small model falls into
loops, in which any lookup drafts everything: a conversation with an answer that repeats itself is left out.
Nothing else is chosen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent

#: Of each task so many conversations are kept, the first of those below.
EACH = 2

#: Of an answer's stretches of eight words, the most that may have stood in it before.
LOOPS = 0.4

EDITS = (
    "Add a docstring to every method. Give me the whole code again.",
    "Rename the class to {name} and keep all else. Give me the whole code again.",
    "Add type hints to all parameters. Give me the whole code again.",
    "Add a method that prints everything. Give me the whole code again.",
    "Add an example of how it is used at the end. Give me the whole code again.",
)
REWORK = (
    "Please write it again, with {name} in the title.",
    "Please write it again and make the first paragraph a little shorter.",
    "Please write it again and change the last paragraph, so that it ends with a question.",
    "Please write it again, without the second paragraph.",
    "Please write it again and add one sentence about the weather.",
)

#: The first turn of each conversation, and those behind it.
CONVERSATIONS: dict[str, list[tuple[str, Sequence[str]]]] = {
    "edit-code": [
        (
            "Write a Python class for a bank account with a balance and methods to deposit and to "
            "withdraw money.",
            [edit.format(name="SavingsAccount") for edit in EDITS],
        ),
        (
            "Write a Python class for a shopping cart that can add an item, remove an item and compute "
            "the total.",
            [edit.format(name="Basket") for edit in EDITS],
        ),
        (
            "Write a Python class for a library that can add a book, lend a book and take it back.",
            [edit.format(name="BookShelf") for edit in EDITS],
        ),
        (
            "Write a Python class Stack with the methods push, pop, peek and is_empty.",
            [edit.format(name="Pile") for edit in EDITS],
        ),
        (
            "Write a Python class Timer that can be started, stopped and asked for the seconds that went by.",
            [edit.format(name="StopWatch") for edit in EDITS],
        ),
    ],
    "edit-text": [
        (
            "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
            [edit.format(name="the sea") for edit in REWORK],
        ),
        (
            "Write a blog post about what I learnt from growing tomatoes on a balcony.",
            [edit.format(name="tomatoes") for edit in REWORK],
        ),
        (
            "Write an email to my colleagues. I leave the company after six years and want to thank them.",
            [edit.format(name="farewell") for edit in REWORK],
        ),
        (
            "Explain how rainbows come about, in three paragraphs, for the newsletter of a school.",
            [edit.format(name="light") for edit in REWORK],
        ),
        (
            "Write a speech for the opening of a small museum of bicycles.",
            [edit.format(name="wheels") for edit in REWORK],
        ),
    ],
    "fill-template": [
        (
            "Write a letter of recommendation for Maria Rossi, who taught mathematics at our school for "
            "five years.",
            [
                f"Write the same letter for {name}, who taught {subject} at our school for {years} years."
                for name, subject, years in (
                    ("James Okafor", "history", "three"),
                    ("Emma Lindqvist", "biology", "eight"),
                    ("Peter Novak", "music", "two"),
                    ("Yuki Tanaka", "chemistry", "ten"),
                    ("Claire Moreau", "French", "four"),
                )
            ],
        ),
        (
            "Write a polite email to Mrs Keller. Her order of a garden chair will be two weeks late.",
            [
                f"Write the same email to {name}. The order of a {thing} will be {time} late."
                for name, thing, time in (
                    ("Mr Okafor", "bookshelf", "one week"),
                    ("Mrs Lindqvist", "desk lamp", "three weeks"),
                    ("Mr Moreau", "coffee table", "ten days"),
                    ("Mrs Tanaka", "wooden stool", "four weeks"),
                    ("Mr Novak", "wardrobe", "two weeks"),
                )
            ],
        ),
        (
            "Write an invitation to the birthday party of my daughter Anna, who turns six on Saturday.",
            [
                f"Write the same invitation for {name}, who turns {age} on {day}."
                for name, age, day in (
                    ("Ben", "seven", "Sunday"),
                    ("Clara", "five", "Friday"),
                    ("David", "eight", "Monday"),
                    ("Ella", "nine", "Thursday"),
                    ("Finn", "ten", "Tuesday"),
                )
            ],
        ),
        (
            "Write a description of a red bicycle for children, for an online shop, in three short "
            "paragraphs.",
            [
                f"Write the same description for a {thing}."
                for thing in (
                    "blue scooter",
                    "green skateboard",
                    "yellow tricycle",
                    "black helmet",
                    "white sled",
                )
            ],
        ),
        (
            "Write a letter to the landlord of Mrs Weber. Her heating has not worked since Monday.",
            [
                f"Write the same letter for {name}. The {thing} has not worked since {day}."
                for name, thing, day in (
                    ("Mr Brown", "elevator", "Friday"),
                    ("Mrs Silva", "shower", "Tuesday"),
                    ("Mr Haddad", "doorbell", "Sunday"),
                    ("Mrs Kim", "oven", "Thursday"),
                    ("Mr Olsen", "light in the hall", "Saturday"),
                )
            ],
        ),
    ],
    "agent-loop": [
        (
            "You are an agent that works off tickets. Answer each ticket with a thought about what may "
            "be wrong, "
            "the steps that you take, and a message to the user. Ticket 1: the printer in room 12 prints "
            "blank pages.",
            [
                f"The user is content. Ticket {number}: {ticket}."
                for number, ticket in enumerate(
                    (
                        "the printer in room 7 prints blank pages",
                        "the monitor in room 7 stays black",
                        "the monitor in room 31 stays black",
                        "the keyboard in room 31 does not work",
                        "the printer in room 4 prints blank pages",
                    ),
                    start=2,
                )
            ],
        ),
        (
            "You are an agent that plans trips. For each city tell me how to get there from Vienna, what "
            "to see on "
            "two days and what it will cost. The first city is Prague.",
            [
                f"Thank you, I have booked it. The next city is {city}."
                for city in ("Budapest", "Munich", "Venice", "Zurich", "Berlin")
            ],
        ),
        (
            "You are an agent that tests a web shop. For each page write what you test, which commands "
            "you run and "
            "what you expect to see. The first page is the login page.",
            [
                f"All of that passed. The next page is the {page} page."
                for page in ("search", "product", "cart", "payment", "logout")
            ],
        ),
        (
            "You are an agent that writes SQL. For each table write a CREATE TABLE statement and a "
            "SELECT statement "
            "that counts its rows. The first table is customers, with a name, an address and an email.",
            [
                f"It ran without errors. The next table is {table}."
                for table in (
                    "suppliers, with a name, an address and an email",
                    "employees, with a name, an email and a salary",
                    "orders, with a customer, a date and a total",
                    "deliveries, with a supplier, a date and a total",
                    "payments, with a customer, a date and a total",
                )
            ],
        ),
        (
            "You are an agent that keeps a diary of a garden. For each day tell me what to do, why, and "
            "what to look "
            "out for. It is Monday: dry, and twenty degrees.",
            [
                f"Done. It is {day}: {weather}."
                for day, weather in (
                    ("Tuesday", "dry, and twenty-five degrees"),
                    ("Wednesday", "rain, and fifteen degrees"),
                    ("Thursday", "rain, and ten degrees"),
                    ("Friday", "dry, and eighteen degrees"),
                    ("Saturday", "dry, and thirty degrees"),
                )
            ],
        ),
    ],
}


def main() -> None:
    from specdecode import LLM, SamplingParams

    args = arguments()
    told = [(task, first, turns) for task, own in CONVERSATIONS.items() for first, turns in own]
    llm = LLM(args.model, dtype=args.dtype, device=args.device, max_model_len=2048, max_num_seqs=len(told))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    messages: list[list[dict[str, str]]] = [[] for _ in told]
    for turn in range(len(EDITS) + 1):  # what an answer is does not depend on what is answered beside it
        for own, (_, first, turns) in zip(messages, told, strict=True):
            own.append({"role": "user", "content": (first, *turns)[turn]})
        answers = llm.chat(messages, params, use_tqdm=False)
        for own, answer in zip(messages, answers, strict=True):
            own.append({"role": "assistant", "content": answer.outputs[0].text})
    kept: dict[str, list[str]] = {task: [] for task in CONVERSATIONS}
    for (task, first, _), own in zip(told, messages, strict=True):
        worst = max(repeated(message["content"]) for message in own[1::2])
        print(f"{task}: {worst:.2f} {first[:60]}")
        if worst <= LOOPS and len(kept[task]) < EACH:
            entry = {"task": task, "id": f"{task}-{len(kept[task]) + 1}", "messages": own}
            kept[task].append(json.dumps(entry, ensure_ascii=False))
    lines = [line for own in kept.values() for line in own]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} conversations")


def repeated(text: str, length: int = 8) -> float:
    """The share of ``text``'s stretches of ``length`` words that stood in it before."""
    words = text.split()
    stretches = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    return 1 - len(set(stretches)) / len(stretches) if stretches else 0.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--out", type=Path, default=HERE / "conversations.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
