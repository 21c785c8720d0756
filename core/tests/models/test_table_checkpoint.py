"""TABLE: a checkpoint whose next token depends on the last one alone, by a law that the test chose."""

from __future__ import annotations

import pytest
import torch
from specdecode.models import load_model, resolve_model
from specdecode.testing.reference import dense_forward
from specdecode.testing.tiny import favour, table_checkpoint, table_logits, tiny_checkpoint


@torch.inference_mode()
def logits_behind(path, ids):
    model = load_model(
        resolve_model(str(path)), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
    )
    hidden, _ = dense_forward(model, ids)
    return model.compute_logits(hidden).float()


IDS = [5, 17, 17, 299, 0, 41]


def test_a_chosen_law_is_the_models_at_every_position(tmp_path):
    law = favour({5: 17, 17: 299}, seed=3)
    path = table_checkpoint(tmp_path / "table", law)
    torch.testing.assert_close(logits_behind(path, IDS), law[IDS], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(table_logits(path), law, atol=1e-4, rtol=1e-5)


def test_the_law_of_random_weights_is_told(tmp_path):
    path = table_checkpoint(tmp_path / "table", seed=4)
    torch.testing.assert_close(logits_behind(path, IDS), table_logits(path)[IDS], atol=1e-5, rtol=1e-5)


def test_favourites_lead_their_rows_by_the_strength():
    law = favour({7: 9}, vocab_size=12, strength=5.0)
    best = law[7].topk(2)
    assert best.indices[0] == 9
    torch.testing.assert_close(best.values[0] - best.values[1], torch.tensor(5.0))


def test_a_law_has_a_row_for_every_token(tmp_path):
    with pytest.raises(ValueError, match=r"\[vocab, vocab\], got \(3, 4\)"):
        table_checkpoint(tmp_path, torch.zeros(3, 4))


def test_a_model_with_working_layers_has_no_table(tmp_path):
    with pytest.raises(ValueError, match="no table checkpoint"):
        table_logits(tiny_checkpoint(tmp_path))
