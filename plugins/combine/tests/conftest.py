"""A target, a head for it, and engines around them."""

from __future__ import annotations

import types

import attrs
import pytest
import torch
from specdec_eagle.testing import write_head
from specdec_ngram.device import DeviceNgramProposer
from specdec_ngram.plugin import specdecode_proposers as ngram_specs
from specdecode import LLM
from specdecode.contract import ProposerSpec
from specdecode.plugins import default_manager, hookimpl
from specdecode.testing import scripted
from specdecode.testing.scripted.config import RecorderConfig
from specdecode.testing.scripted.wrapping import WrappingProposer, build, union_of
from specdecode.testing.tiny import tiny_checkpoint


class NgramOnDevice:
    """Prompt lookup as it is on a GPU, for a target on a CPU."""

    @hookimpl
    def specdecode_proposers(self):
        (spec,) = ngram_specs()
        on_a_gpu = types.SimpleNamespace(target=types.SimpleNamespace(device="cuda:0"))
        yield ProposerSpec(
            name="lookup-on-device",
            summary=spec.summary,
            api=1,
            config=spec.config,
            needs=lambda config, context: spec.needs(config, on_a_gpu),
            build=lambda config, context: DeviceNgramProposer(config),
        )


class TellingProposer(WrappingProposer):
    """Scores its drafts by the probabilities of what it drew, as many drafters do."""

    def propose(self, step, out):
        super().propose(step, out)
        probs = torch.as_tensor(out.probs).gather(-1, torch.as_tensor(out.ids)[..., None])[..., 0]
        torch.as_tensor(out.score)[:] = probs.cumprod(-1)


class Telling:
    """``telling``: another method that tells laws, with scores."""

    @hookimpl
    def specdecode_proposers(self):
        yield ProposerSpec(
            name="telling",
            summary="scores by what was drawn",
            api=1,
            config=RecorderConfig,
            needs=lambda config, ctx: attrs.evolve(union_of([config.inner], ctx), scores=True),
            build=lambda config, ctx: TellingProposer(build(config.inner, ctx)),
        )


@pytest.fixture(scope="session")
def manager():
    """The installed methods, the scripted ones, and those above."""
    manager = default_manager()
    scripted.install(manager)
    added = {"lookup-on-device": NgramOnDevice(), "telling": Telling()}
    for name, plugin in added.items():
        manager.register(plugin, name)
    yield manager
    for name in added:
        manager.unregister(name)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Its next token follows from the last one, so that lookups and untrained heads guess some."""
    path = tmp_path_factory.mktemp("combine") / "target"
    return tiny_checkpoint(path, output_scale=0.2, num_hidden_layers=8, max_position_embeddings=256)


@pytest.fixture(scope="session")
def eagle(target):
    """Keys of a head."""
    head = write_head(target.parent / "eagle", "eagle", target)
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


@pytest.fixture(scope="session")
def llm_of(target, manager):
    """``llm_of(speculative_config, **options) -> LLM`` around the target."""

    def make(config, *, model=target, **options):
        defaults = {
            "dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "num_gpu_blocks_override": 300,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 96,
            "skip_tokenizer_init": True,
        }
        return LLM(str(model), speculative_config=config, **(defaults | options))

    return make


@pytest.fixture(scope="session")
def run():
    """``run(llm, prompts, params) -> ids`` of each output."""

    def ids(llm, prompts, params):
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return ids


@pytest.fixture(scope="session")
def metrics():
    """``metrics(llm) -> {name: value}``."""
    return lambda llm: {metric.name: metric.value for metric in llm.get_metrics()}
