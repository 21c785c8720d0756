"""Who may take a seat: what of a request the host must look at between two steps. Knows no torch."""

from __future__ import annotations

from ..contract import Memory, Needs, Place
from .request import Request

# Why the device waits for the host, as counted in ``specdecode:host_waits``.
ADMISSION = "admission"  #: a request waits that may have room now
PREFILL = "prefill"  #: a prompt, or what was lost to a preemption, is computed
SEATS = "seats"  #: rows ended, and those that are left sit together again
PROPOSER = "host_proposer"  #: drafts are made on the host
WEIGHING = "weighing_rule"
PROCESSORS = "logits_processors"
GRAMMAR = "structured_outputs"
LOGPROBS = "logprobs"
SAMPLING = "sampling_parameters"  #: penalties, bias, allowed or banned tokens
BACKGROUND = "background"  #: the engine checks an output again
CATCH_UP = "catch_up"  #: draft layers are behind
MEMORY = "memory"  #: no block is free: something must be taken away from somebody
UNDRAWABLE = "undrawable"  #: logits of which no token can be drawn
FAILED = "proposer_failure"
LOST = "error"  #: a step raised
ENDING = "ending"  #: nothing is left to compute
REASONS = (
    ADMISSION,
    PREFILL,
    SEATS,
    PROPOSER,
    WEIGHING,
    PROCESSORS,
    GRAMMAR,
    LOGPROBS,
    SAMPLING,
    BACKGROUND,
    CATCH_UP,
    MEMORY,
    UNDRAWABLE,
    FAILED,
    LOST,
    ENDING,
)


def why_not_seated(request: Request, needs: Needs | None) -> str | None:
    """What keeps the host in the loop for ``request``; None: nothing does."""
    if request.background:
        return BACKGROUND
    if request.at_limit or request.failed:
        return ENDING
    if request.todo != 1 or request.target_floor > request.computed:
        return PREFILL
    if request.images and not request.prompt_computed:  # its last token may stand for a part of one
        return PREFILL
    if (why := why_looked_at(request)) is not None:
        return why
    if needs is not None and not request.rests and any(own != len(request.token_ids) for own in request.own):
        return CATCH_UP
    return None


def why_looked_at(request: Request) -> str | None:
    """What of ``request`` the host must look at between any two of its steps."""
    params = request.params
    if request.processors is not None:
        return PROCESSORS
    if request.grammar is not None:
        return GRAMMAR
    if params.logprobs is not None:
        return LOGPROBS
    if request.history is not None or request.bad_words is not None or params.logit_bias:
        return SAMPLING
    if params.allowed_token_ids is not None or request.num_output < params.min_tokens:
        return SAMPLING
    return None


def may_rest(needs: Needs) -> bool:
    """Whether a proposer can be left out of steps over the seats, and feeding it in vain costs something.

    One that keeps text from request to request must see all of it.
    """
    costs = bool(needs.kv or needs.taps)
    return costs and needs.place is Place.DEVICE and needs.memory is Memory.REQUEST
