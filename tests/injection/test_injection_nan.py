"""NaN logits of one row in one step: its request ends with an error, the rest are right."""

from __future__ import annotations

import attrs
import pytest
import torch


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", ["none", "ngram", "oracle-tree", "self-draft", "eagle"])
@pytest.mark.parametrize("step", [0, 3])
def test_nan_in_one_row_of_one_step(lab, monkeypatch, method, order, step):
    """Where there were drafts they are blamed, and the row is computed again without them."""
    asks = lab.mixed(6, max_tokens=10)
    with lab.rig(method, asks, order) as rig:
        rig.stateless = False  # a row that is asked again without drafts is no longer drafted for
        steps, poisoned = [], []
        forward = rig.core.runner.forward
        with monkeypatch.context() as patch:

            @torch.inference_mode()
            def watched(plan):
                output = forward(plan)
                steps.append(plan)
                drawing = [place for place, row in enumerate(plan.rows) if row.samples]
                if len(steps) > step and drawing and not poisoned:
                    row = plan.rows[drawing[-1]]
                    first = output.batch.logit_offsets[drawing[-1]]
                    logits = output.logits.clone()
                    logits[first : first + 1 + len(row.drafts)] = torch.nan
                    output = attrs.evolve(output, logits=logits)
                    poisoned.append(
                        (row.request.id.partition("/")[0], row.request.num_output, bool(row.drafts))
                    )
                return output

            patch.setattr(rig.core.runner, "forward", watched)
            prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
            outputs = rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)
        ((name, num_output, drafted),) = poisoned
        for ask, output in zip(asks, outputs, strict=True):
            if output.request_id != name or drafted:
                rig.compare(ask, output)
                assert output.outputs[0].error is None
                continue
            (completion,) = output.outputs
            assert completion.finish_reason == "error" and "NaN" in completion.error
            assert list(completion.token_ids) == lab.expected(ask)[:num_output]
        rig.generate(asks)
