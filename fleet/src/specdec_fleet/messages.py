"""What door and replicas say to each other."""

from __future__ import annotations

from typing import Any

import attrs
from specdecode import LoRARequest, SamplingParams
from specdecode.api.facts import EngineFacts
from specdecode.api.prompts import TokenizedPrompt


@attrs.frozen(kw_only=True)
class Ask:
    """A request on its way to a replica, ready to be queued there."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams  #: with a seed, so that every replica gives the same tokens
    priority: int = 0
    lora_request: LoRARequest | None = None
    avoid: frozenset[str] = frozenset()  #: replicas that were lost with a request

    @property
    def namespace(self) -> str:
        """Equal prefixes have equal KV within it alone."""
        adapter = self.lora_request.lora_name if self.lora_request is not None else ""
        return f"{adapter}\n{self.prompt.cache_salt}"  # neither holds line breaks


@attrs.frozen(kw_only=True)
class Question:
    """A prompt to be tokenized and checked; any replica can."""

    prompt: Any
    params: SamplingParams
    where: str  #: what messages of errors call the prompt
    avoid: frozenset[str] = frozenset()


@attrs.frozen
class Accepted:
    """First answer to an :class:`Ask`: the replica has queued it."""

    replica: str


@attrs.frozen
class Pulse:
    """Said while there is nothing else to say: the replica lives, and its engine moves."""


@attrs.frozen
class Order:
    """A call that is meant for one replica."""

    replica: str
    method: str
    args: tuple[Any, ...] = ()


@attrs.frozen(kw_only=True)
class Description:
    """What the door has to know of the replicas, which are all alike."""

    facts: EngineFacts
    tokenizer: Any  #: of transformers; None under ``skip_tokenizer_init``
    defaults: SamplingParams


@attrs.frozen(kw_only=True)
class Whereabouts:
    """Where a replica runs."""

    replica: str
    node: str  #: Ray's id of the machine
    pid: int
