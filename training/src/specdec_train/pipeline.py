"""A run from prompts to a published checkpoint, stage by stage; each is passed over if it has been done."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from specdecode.contract import ConfigError

from .answers import make_texts
from .corpus import Batches, Corpus, StateSource, StoredStates
from .evaluation import Acceptance, HeldOut
from .fresh import FreshStates
from .gate import GateRefused, Verdict, judge
from .loop import Point, Progress, Training
from .options import DataOptions, LoopOptions, PublishOptions
from .publishing import write_checkpoint
from .recipe import Boundary, Recipe
from .report import write_report
from .states import make_states
from .target import Target
from .texts import Texts, TextStore, read_json, write_json


class Teller(Protocol):
    """Who is told how a run goes."""

    def stage(self, name: str, total: float | None = None) -> None: ...
    def advance(self, done: float, detail: str) -> None: ...


@attrs.frozen(kw_only=True, eq=False)
class Run:
    """What is asked for."""

    recipe: Recipe
    options: Any  #: of the recipe
    model: str
    data: tuple[str, ...]
    out: Path
    work: Path  #: where texts and states are kept, for runs that agree in model and data to share
    data_options: DataOptions
    loop_options: LoopOptions
    publish_options: PublishOptions
    dtype: str = "auto"
    device: str = "auto"


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of it."""

    published: bool
    path: Path
    held_out: Acceptance
    verdict: Verdict | None
    report: Mapping[str, Any]


def run(asked: Run, teller: Teller) -> Outcome:
    """Carry out ``asked``.

    Raises:
        ConfigError: an option does not fit, before anything is made; or ``out`` holds another run.
        GateRefused: the checkpoint is not published; it lies in ``out/refused``.
    """
    target = Target.resolve(asked.model, dtype=asked.dtype, device=asked.device)
    taps = asked.recipe.taps(asked.options, target.info)
    _claim(asked, target)
    data = asked.data_options
    store = TextStore(asked.work / f"{_data_key(asked, target)}")
    started = time.time()

    teller.stage("answers", data.data_tokens)
    texts = make_texts(target.writer(data), store, asked.data, data, advance=teller.advance)
    loop = asked.loop_options
    if not loop.fresh_states:
        teller.stage("states", float(len(texts.ids)))
        make_states(target.engines(), store, taps, advance=teller.advance)

    _free(target)
    torch.manual_seed(data.seed)
    for_training = target.for_training(texts.counts(target.info.vocab_size))
    corpus = Corpus.of(texts, _states(loop, target, store, taps), target.device)
    module = asked.recipe.build(asked.options, for_training)
    rows = {"row_tokens": loop.row_tokens, "batch_rows": loop.batch_rows}
    training = Training(
        module,
        Batches(corpus, seed=data.seed, **rows),
        HeldOut(corpus, depth=asked.recipe.depth, **rows),
        loop,
        learning_rate=loop.learning_rate or asked.recipe.learning_rate,
        device=target.device,
        dtype=target.dtype,
        file=asked.out / "state.pt",
        tell=lambda progress, point: teller.advance(*_told(progress, point)),
    )
    teller.stage("training", float(loop.steps) if loop.steps else None)
    progress = training.run()
    held_out = training.evaluate()
    teller.advance(progress.step, held_out.describe())

    publish = asked.publish_options
    draft = asked.out / "refused"
    checkpoint = module.checkpoint()
    write_checkpoint(
        checkpoint,
        draft,
        target.files.path,
        dtype=getattr(torch, publish.weights_dtype),
        shard_bytes=publish.shard_mib << 20,
    )
    facts = checkpoint.facts
    del checkpoint, training, corpus, module, for_training  # the gate's engines want the memory
    _free(target)
    verdict = None
    if publish.gate:
        teller.stage("gate")
        verdict = _judge(asked, target, texts, draft)
        teller.advance(1, f"acceptance length {verdict.acceptance_length:.2f}, {verdict.speedup:.2f}x")
    report = write_report(
        draft,
        run=_asked(asked),
        facts=facts,
        target=target,
        texts=texts,
        progress=progress,
        held_out=held_out,
        verdict=verdict,
        seconds=time.time() - started,
        licence=publish.licence,
        name=asked.recipe.name,
        speculative_config=asked.recipe.speculative_config(asked.options, draft),
    )
    if verdict is not None and verdict.faults and not (publish.force and verdict.conforms):
        raise GateRefused(
            f"{asked.recipe.name} is not published, since {'; '.join(verdict.faults)}. It lies in {draft}"
            + ("; --force publishes it all the same" if verdict.conforms else "")
        )
    path = asked.out / "checkpoint"
    shutil.rmtree(path, ignore_errors=True)
    os.replace(draft, path)
    return Outcome(published=True, path=path, held_out=held_out, verdict=verdict, report=report)


def _states(
    loop: LoopOptions, target: Target, store: TextStore, taps: tuple[Boundary, ...]
) -> Callable[[torch.Tensor], StateSource]:
    """What makes the source of states, given the texts' ids."""
    if loop.fresh_states:
        return functools.partial(FreshStates, target.decoder(), taps)
    return lambda ids: StoredStates(store.folder, len(store.files()), taps, target.device)


def _free(target: Target) -> None:
    """Give back what engines and training left in torch's hands."""
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def _judge(asked: Run, target: Target, texts: Texts, draft: Path) -> Verdict:
    publish = asked.publish_options
    held_out = [index for index in range(len(texts)) if texts.held_out[index]]
    return judge(
        asked.model,
        asked.recipe.speculative_config(asked.options, draft),
        [texts.prompt(index) for index in held_out[: publish.gate_prompts]],
        max_tokens=publish.gate_tokens,
        conform=publish.conform,
        dtype=target.info.dtype,
        device=str(target.device),
    )


def _told(progress: Progress, point: Point) -> tuple[float, str]:
    rate = progress.tokens / point.seconds if point.seconds else 0.0
    detail = f"loss {point.loss:.4f}, {rate:,.0f} tokens/s"
    if "agree_0" in point.terms:
        detail += f", agrees {point.terms['agree_0']:.3f}"
    if point.acceptance is not None:
        detail += f", held out: {point.acceptance.describe()}"
    return point.step, detail


# -- what makes two runs one ----------------------------------------------------------------------
def _fingerprint(target: Target) -> dict[str, Any]:
    """Of the target's weights, by their files' names and sizes, and of its config."""
    files = sorted(target.files.path.glob("*.safetensors"))
    return {
        "weights": [[file.name, file.stat().st_size] for file in files],
        "config": target.info.config,
        "dtype": target.info.dtype,
    }


def _data_key(asked: Run, target: Target) -> str:
    kept = attrs.asdict(asked.data_options)
    for free in ("data_minutes", "writers"):
        kept.pop(free)
    contents = [source if source == "self" else _digest(Path(source).expanduser()) for source in asked.data]
    return _hash({"target": _fingerprint(target), "data": contents, **kept})


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--data: cannot read {file}: {error.strerror}") from None


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _asked(asked: Run) -> dict[str, Any]:
    """What a report says of the run."""
    return {
        "method": asked.recipe.name,
        "model": _name(asked.model),
        "data": [_name(source) for source in asked.data],
        "options": attrs.asdict(asked.options),
        "data_options": attrs.asdict(asked.data_options),
        "loop_options": attrs.asdict(asked.loop_options),
    }


def _name(source: str) -> str:
    """Without the folders of this machine, if it is a path."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


def _claim(asked: Run, target: Target) -> None:
    """Make ``out`` this run's, or see that it is: a state goes on only under the options it began with."""
    file = asked.out / "run.json"
    loop = attrs.asdict(asked.loop_options)
    for free in ("minutes", "save_minutes", "evaluate_every"):
        loop.pop(free)
    mine = json.loads(
        json.dumps(
            {
                "method": asked.recipe.name,
                "options": attrs.asdict(asked.options),
                "loop": loop,
                "data": _data_key(asked, target),
            }
        )
    )
    before = read_json(file)
    if before is None:
        asked.out.mkdir(parents=True, exist_ok=True)
        write_json(file, mine)
        return
    if differing := _differing(before, mine):
        raise ConfigError(
            f"--out {asked.out} holds a run with other {', '.join(differing)}: go on with the same options, "
            "or give another directory"
        )


def _differing(before: Mapping[str, Any], mine: Mapping[str, Any], at: str = "") -> Sequence[str]:
    names: list[str] = []
    for key in mine.keys() | before.keys():
        old, new = before.get(key), mine.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += _differing(old, new, f"{at}{key}.")
        elif old != new:
            names.append(f"{at}{key}")
    return sorted(names)
