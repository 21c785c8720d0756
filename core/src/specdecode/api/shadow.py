"""Shadow mode: a share of the finished completions is decoded again without speculation, and compared.

The copy runs in the background (:attr:`Request.background`): it waits for everybody, takes nothing
from the prefix cache and puts nothing there, is not drafted for, and no count or time of a user's
request holds it. It ends at its first difference.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from itertools import count

import attrs

from ..engine.divergence import Divergence, explain
from ..engine.loop import EngineCore
from ..engine.metrics import Counter
from ..engine.output import RequestOutputState
from ..engine.request import Request
from .params import SamplingParams
from .prompts import TokenizedPrompt

logger = logging.getLogger(__name__)

#: Most completions that wait to be checked; more are passed over, and counted.
MOST_WAITING = 256


@attrs.frozen(kw_only=True, eq=False)
class Original:
    """A finished completion, and what is needed to decode it again."""

    name: str
    prompt: TokenizedPrompt
    params: SamplingParams
    seed: int
    index: int
    output: RequestOutputState


#: As :meth:`LLMEngine.build_request`.
Build = Callable[..., Request]


class Shadow:
    """Chooses completions, decodes them again, compares and counts.

    Args:
        rate: the share to be checked, above 0 and at most 1.
        core: which runs the copies.
        build: makes the request of a copy.
    """

    def __init__(self, rate: float, core: EngineCore, build: Build) -> None:
        self._rate = rate
        self._core = core
        self._build = build
        self._waiting: deque[Original] = deque()
        self._running: dict[Request, Original] = {}
        self._crowded = False  # in the last step somebody could not be admitted
        self._serial = count()
        self.checked = Counter(name="specdecode:shadow_checked")
        self.passed_over = Counter(name="specdecode:shadow_passed_over")
        self.mismatches = {
            kind: Counter(name="specdecode:shadow_mismatches", labels={"kind": kind})
            for kind in ("tie", "bug")
        }
        for counter in (self.checked, self.passed_over, *self.mismatches.values()):
            core.metrics.include(counter)

    @property
    def pending(self) -> bool:
        """Whether completions are still to be checked."""
        return bool(self._waiting or self._running)

    def forget(self) -> None:
        """Check nothing that is still to be checked."""
        for request in self._running:
            self._core.abort(request)
        self._running.clear()
        self._waiting.clear()

    # -- from finished completions to requests ------------------------------------------------------
    def offer(
        self, name: str, prompt: TokenizedPrompt, params: SamplingParams, output: RequestOutputState
    ) -> None:
        """Queue a finished completion if it is one of the chosen.

        Which are chosen depends on the request's id, its seed and the completion's index alone.
        """
        request = output.request
        if not (self._chosen(name, request) and self._repeatable(output)):
            return
        if len(self._waiting) >= MOST_WAITING:
            self.passed_over.inc()
            return
        self._waiting.append(
            Original(
                name=f"{name}/{request.index}",
                prompt=prompt,
                params=params,
                seed=request.seed,
                index=request.index,
                output=output,
            )
        )

    def _chosen(self, name: str, request: Request) -> bool:
        key = f"{name}\0{request.seed}\0{request.index}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
        return number < self._rate * 2**64

    def _repeatable(self, output: RequestOutputState) -> bool:
        """Whether plain decoding would have to give the same tokens.

        Not if it was aborted or failed, or if a logits processor may keep a state that there is no second
        one of.
        """
        params = output.request.params
        return (
            output.finish is not None
            and output.finish.reason in ("stop", "length")
            and all(hasattr(processor, "clone") for processor in params.logits_processors or ())
        )

    # -- around each step -----------------------------------------------------------------------------
    def before_step(self) -> None:
        """Start copies: many while nobody else is there, else one; none while somebody has to wait."""
        scheduler = self._core.scheduler
        busy = bool(scheduler.num_running or scheduler.num_waiting)
        most = 1 if busy else scheduler.config.max_num_seqs
        while len(self._running) > (0 if self._crowded else most):
            request, original = self._running.popitem()
            self._core.abort(request)
            self._waiting.appendleft(original)
        while self._waiting and len(self._running) < most and not (self._crowded or scheduler.num_waiting):
            original = self._waiting.popleft()
            request = self._request(original)
            self._core.add(request)
            self._running[request] = original

    def after_step(self) -> None:
        """Look whether copies stood in somebody's way."""
        self._crowded = self._core.scheduler.num_waiting > 0

    def take(self, state: RequestOutputState) -> bool:
        """Whether ``state`` is a copy's; if so it is compared, as far as it goes."""
        original = self._running.get(state.request)
        if original is None:
            return False
        same = state.token_ids == original.output.token_ids[: len(state.token_ids)]
        if same and not state.finish:
            return True
        del self._running[state.request]
        if not state.finish:
            self._core.abort(state.request)
        self.checked.inc()
        if not (same and state.finish == original.output.finish):
            self._mismatch(original, state)
        return True

    def _mismatch(self, original: Original, copy: RequestOutputState) -> None:
        ids, plain = original.output.token_ids, copy.token_ids
        divergence: Divergence | None = None
        try:
            runner, request = self._core.runner, self._request(original)
            given = None if runner.images is None else runner.images.of_prompt(request.images)
            divergence = explain(runner.model, request, ids, plain, given)
        except Exception:  # what is checked here must not harm who is served
            logger.exception("shadow: the difference in request %s cannot be explained", original.name)
        kind = "bug" if divergence is None else divergence.kind
        self.mismatches[kind].inc()
        if divergence is None:
            logger.error(
                "shadow: request %s: bug at output token %d: %s with speculation, %s without",
                original.name,
                len(ids),
                original.output.finish,
                copy.finish,
            )
        else:
            logger.log(
                logging.ERROR if kind == "bug" else logging.WARNING,
                "shadow: request %s: with speculation (a) and without (b): %s",
                original.name,
                divergence,
            )

    def _request(self, original: Original) -> Request:
        request = self._build(
            f"shadow-{next(self._serial)}:{original.name}",
            original.prompt,
            original.params.clone(
                detokenize=bool(original.params.stop), logprobs=None, prompt_logprobs=None, speculation=0
            ),
            seed=original.seed,
            index=original.index,
        )
        request.adapter = original.output.request.adapter
        request.background = True
        return request
