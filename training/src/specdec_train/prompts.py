"""Where prompts come from: files, or the target itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdecode import SamplingParams
from specdecode.api.chat import ChatOptions, chat_prompt
from specdecode.contract import ConfigError

from .waves import in_waves

#: ``--data`` of prompts that the target writes itself.
SELF = "self"
#: Stands for a user's message while a chat template is taken apart.
_MARK = "\u241f specdec \u241f"
_SHORTEST = 8  #: characters of a user's turn that is kept


def read_prompts(path: Path) -> list[Any]:
    """The conversations of a JSONL file: of each line ``messages``, or ``prompt`` as a user's message.

    Raises:
        ConfigError: the file cannot be read, or a line is neither; names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data: cannot read {path}: {error}") from None
    found: list[Any] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--data: {path}, line {number} is not JSON: {error.msg}") from None
        conversation = None
        if isinstance(entry, dict) and isinstance(entry.get("messages"), list) and entry["messages"]:
            conversation = entry["messages"]
        elif isinstance(entry, dict) and isinstance(entry.get("prompt"), str) and entry["prompt"].strip():
            conversation = [{"role": "user", "content": entry["prompt"]}]
        if conversation is None:
            raise ConfigError(
                f'--data: {path}, line {number} must be {{"prompt": "..."}} or {{"messages": [...]}}'
            )
        found.append(conversation)
    if not found:
        raise ConfigError(f"--data: {path} holds no prompt")
    return found


def encode(tokenizer: Any, conversation: Any) -> list[int]:
    """Token ids of a conversation in the chat template, with the assistant's turn begun.

    A tokenizer without a template: the texts, one behind the other.
    """
    if tokenizer.chat_template:
        return list(chat_prompt(tokenizer, conversation, ChatOptions())["prompt_token_ids"])
    return list(tokenizer("\n".join(str(message["content"]) for message in conversation))["input_ids"])


def opening(tokenizer: Any) -> list[int]:
    """Token ids of a chat up to where the user begins to write.

    Raises:
        ConfigError: the tokenizer has no chat template, or it changes what a user writes.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"--data {SELF} wants a chat template, whose opening the target goes on with as a user would; "
            "the tokenizer has none: give a JSONL file of prompts"
        )
    options = ChatOptions(add_generation_prompt=False)
    text = str(chat_prompt(tokenizer, [{"role": "user", "content": _MARK}], options)["prompt"])
    if _MARK not in text:
        raise ConfigError(
            f"--data {SELF}: the chat template changes what a user writes: give a JSONL file of prompts"
        )
    return list(tokenizer(text.split(_MARK)[0], add_special_tokens=False)["input_ids"])


def write_user_turns(llm: Any, count: int, seed: int, *, max_tokens: int, batch_size: int) -> list[Any]:
    """Up to ``count`` conversations of one user's message, which the target wrote; equal seeds, equal texts.

    What did not end by itself, is too short to mean anything or was there before is left out.
    """
    tokenizer = llm.get_tokenizer()
    start = opening(tokenizer)
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=max_tokens, seed=seed + index, detokenize=False
        )
        for index in range(count)
    ]
    outputs = in_waves(llm, [{"prompt_token_ids": start}] * count, params, batch_size)
    texts = dict.fromkeys(
        tokenizer.decode(ids, skip_special_tokens=True).strip() for ids, why in outputs if why == "stop"
    )
    return [[{"role": "user", "content": text}] for text in texts if len(text) >= _SHORTEST]


def is_self(source: str) -> bool:
    return source == SELF


def sources(data: Sequence[str]) -> tuple[list[Any], bool]:
    """The conversations of all files in ``data``, and whether the target writes further ones."""
    files = [Path(source).expanduser() for source in data if not is_self(source)]
    return [prompt for file in files for prompt in read_prompts(file)], any(map(is_self, data))
