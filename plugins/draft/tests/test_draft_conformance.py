"""The promises of the contract, each tried."""

from specdecode.testing.conformance import Case, parametrize_with_checks
from specdecode.testing.tiny import tiny_checkpoint


def draft(**options):
    """Keys for a smaller draft of the kit's target."""

    def config(toy):
        path = tiny_checkpoint(
            toy.path.parent / "draft", output_scale=0.5, max_position_embeddings=256, num_hidden_layers=1
        )
        return {"model": str(path), "num_speculative_tokens": 3, **options}

    return config


@parametrize_with_checks(
    [
        ("draft_model", draft()),
        Case(method="draft_model", config=draft(rejection_sample_method="standard")),
        Case(method="draft_model", config=draft(max_model_len=24, draft_sample_method="greedy")),
    ]
)
def test_conformance(check):
    check()
