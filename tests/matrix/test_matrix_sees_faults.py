"""One-line faults in sampler, verifier, scheduler, text and KV code: each is seen by the cells named here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import attrs
import pytest

ORACLE = ("oracle", "batch")
PLAIN = ("plain", "batch")


@attrs.frozen
class Mutant:
    """``wrong(original)`` stands in the place of what ``target`` names; seen by the cases of ``fields``."""

    name: str
    target: str
    wrong: Callable[[Any], Any]
    fields: tuple[str, ...]
    cell: tuple[str, str] = PLAIN


def changed(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, called with keywords that are changed so."""
    return lambda function: (
        lambda *args, **given: function(
            *args, **given | {name: change(given[name]) for name, change in changes.items() if name in given}
        )
    )


def at(place: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, with its positional argument at ``place`` changed so."""
    return lambda function: (
        lambda *args, **given: function(*args[:place], change(args[place]), *args[place + 1 :], **given)
    )


def ignored(function: Any) -> Callable[..., None]:
    return lambda *args, **given: None


def result(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function, with what it gives changed so."""
    return lambda function: lambda *args, **given: change(function(*args, **given))


KERNELS = "specdec_kernels.sampling"
CORE = "specdecode"

MUTANTS = (
    # -- sampler
    Mutant("presence counts each time", f"{KERNELS}.penalize",
           lambda f: lambda a, r, i, counts, *, presence, frequency, repetition: f(
               a, r, i, counts, presence=presence * 0, frequency=frequency + presence, repetition=repetition),
           ("presence_penalty",)),
    Mutant("frequency counts once", f"{KERNELS}.penalize", at(3, lambda counts: counts.clamp(max=1)),
           ("frequency_penalty",)),
    Mutant("repetition is subtracted", f"{KERNELS}.penalize", changed(repetition=lambda r: 1 / r),
           ("repetition_penalty",)),
    Mutant("penalties forget the drafts before a token", f"{CORE}.sampling.history.TokenHistory.counts",
           lambda f: lambda self, path=(): f(self), ("frequency_penalty",), ORACLE),
    Mutant("min_p of half", f"{KERNELS}.keep_min_p", at(2, lambda p: p / 2), ("min_p",)),
    Mutant("top_k of one more", f"{KERNELS}.keep_top_k",
           lambda f: lambda logits, rows, k, most: f(logits, rows, k + 1, most + 1), ("top_k",)),
    Mutant("top_p of less", f"{KERNELS}.keep_top_p", at(2, lambda p: p * 0.8), ("top_p",)),
    Mutant("temperature squared", f"{KERNELS}.scale_temperature", at(1, lambda t: t * t), ("temperature",)),
    Mutant("no bias", f"{KERNELS}.add_bias", ignored, ("logit_bias",)),
    Mutant("allowed ids are ignored", f"{KERNELS}.keep_tokens", ignored, ("allowed_token_ids",)),
    Mutant("completions share their noise", f"{KERNELS}.perturb", at(2, lambda index: index * 0), ("n",)),
    Mutant("seeds lose their high half", f"{KERNELS}.perturb", at(1, lambda seed: seed % 2**32), ("seed",)),
    Mutant("a stop may be drawn before min_tokens", f"{KERNELS}.ban_tokens", ignored, ("min_tokens",)),
    Mutant("bad words ban nothing", f"{CORE}.sampling.bad_words.BadWords.after", result(lambda ids: ()),
           ("bad_words",)),
    Mutant("bad words forget the drafts before a token", f"{CORE}.engine.draws._banned",
           lambda f: lambda request, position, path: f(request, len(request.token_ids), ()),
           ("bad_words",), ORACLE),
    Mutant("ranks count from 0", f"{CORE}.engine.verification.gather_logprobs",
           result(lambda rows: [attrs.evolve(row, ranks=[r - 1 for r in row.ranks]) for row in rows]),
           ("logprobs",)),
    # -- verifier
    Mutant("log-probabilities of the row before", f"{CORE}.engine.verification._logprobs",
           lambda f: lambda plan, target, verdicts: f(
               plan, attrs.evolve(target, logits=target.logits.roll(1, 0)), verdicts),
           ("logprobs",), ORACLE),
    Mutant("positions do not count drafts", f"{CORE}.engine.draws.sample_row",
           lambda f: lambda request, position, path=(), *rest: f(request, position - len(path), path, *rest),
           ("n", "seed", "temperature"), ORACLE),
    Mutant("a processor is not told of the drafts", f"{CORE}.engine.draws.LazyTargets.__getitem__",
           lambda f: lambda self, place: f(
               attrs.evolve(self, rows=[attrs.evolve(row, path=()) for row in self.rows]), place),
           ("logits_processors",), ORACLE),
    # -- ends and text
    Mutant("stop strings within a token alone", f"{CORE}.engine.output.find_stop",
           lambda f: lambda text, new, stops: f(text[len(text) - new :], new, stops), ("stop",)),
    Mutant("min_tokens holds no stop token back", f"{CORE}.engine.output.stop_at_token",
           changed(min_tokens=lambda least: 0), ("min_tokens",)),
    Mutant("the stop that is named first", f"{CORE}.engine.output.find_stop",
           lambda f: lambda text, new, stops: next(filter(None, (f(text, new, [s]) for s in stops)), None),
           ("stop",)),
    Mutant("the end of the text is forgotten", f"{CORE}.engine.detokenize.Detokenizer.flush",
           lambda f: lambda self: 0, ("logits_processors",)),
    Mutant("special tokens are shown apart", f"{CORE}.engine.detokenize.TightSpecialTokens",
           lambda f: lambda tokenizer: tokenizer, ("spaces_between_special_tokens",)),
    # -- scheduler and KV
    Mutant("accepted nodes of a tree stay where they are", f"{CORE}.runner.runner.ModelRunner.keep_accepted",
           ignored, ("logprobs", "n"), ("oracle-tree", "batch")),
    Mutant("a chunk is placed one slot late", f"{CORE}.engine.request.Request.positions_to_score",
           result(lambda places: range(places.start, max(places.start, places.stop - 1))),
           ("prompt_logprobs",), ("plain", "chunked")),
    Mutant("blocks of other prompts are hits", f"{CORE}.kv.keys.BlockKeys.key",
           at(2, lambda ids: [0] * len(ids)), ("logprobs", "n", "stop"), ("plain", "prefix-hits")),
    Mutant("a preempted request keeps its computed count", f"{CORE}.engine.request.Request.drop_kv",
           lambda f: lambda self: (self.table.release(), setattr(self, "drafts", type(self.drafts)((), ()))),
           ("logprobs", "n", "stop", "seed"), ("plain", "preempted")),
    Mutant("prompt log-probabilities from the prefix cache", f"{CORE}.engine.request.Request.scores_prompt",
           lambda f: False, ("prompt_logprobs",)),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_seen(matrix, mutant, monkeypatch):
    """Without the fault :mod:`test_matrix` finds the same cells right."""
    proposer, name = mutant.cell
    circumstance = next(c for c in matrix.circumstances if c.name == name)
    cases = [case for case in matrix.fields if not set(mutant.fields).isdisjoint(case.changes)]
    owner, _, attribute = mutant.target.rpartition(".")
    original = pkgutil.resolve_name(mutant.target)
    matrix.close()
    try:
        monkeypatch.setattr(pkgutil.resolve_name(owner), attribute, mutant.wrong(original))
        wrong = matrix.compare(proposer, circumstance, cases, known=matrix.cases, strict=False)
    except (AssertionError, RuntimeError, IndexError) as error:  # the engine saw it first
        wrong = [repr(error)]
    finally:
        monkeypatch.undo()
        matrix.abandon()
    assert wrong
