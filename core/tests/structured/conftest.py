"""A compiler of grammars over the tiny tokenizer, whose tokens are bytes."""

from __future__ import annotations

from typing import Any

import pytest

VOCAB = 300
EOS = 2


@pytest.fixture(scope="session")
def tokenizer(tiny_target: Any) -> Any:
    from specdecode.models import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(str(tiny_target)))


@pytest.fixture(scope="session")
def compiler(tokenizer: Any) -> Any:
    from specdecode.structured import GrammarCompiler, StructuredOutputsConfig

    return GrammarCompiler(tokenizer, VOCAB, [EOS], StructuredOutputsConfig())
