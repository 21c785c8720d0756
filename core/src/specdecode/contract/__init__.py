"""The Proposer contract: all a plugin author reads. Importing it imports no torch.

See ``docs/contract.md`` for the rules behind it.
"""

from .config import MAX_SPECULATIVE_TOKENS, DraftModelFields, LengthFields, option, within
from .drafts import Drafts
from .errors import ConfigError, SpecdecodeError, Undeclared, Unsupported
from .needs import (
    EMBED,
    EXTRA_LAYERS,
    FINAL,
    LM_HEAD,
    KVSpec,
    Memory,
    Needs,
    Place,
    Probs,
    Ranks,
    Shape,
    Tap,
    Tokens,
)
from .proposer import Bucket, CostCurve, Proposer, Resources, TargetHandle, TargetUpdate
from .spec import (
    API,
    BuildContext,
    CheckpointInfo,
    Match,
    PlanContext,
    ProposerSpec,
    TargetInfo,
    TargetTokenizer,
    TensorInfo,
    TokenizerEntries,
    never,
)
from .view import Commit, RequestInfo, StepSource, StepView

__all__ = [
    "API", "EMBED", "EXTRA_LAYERS", "FINAL", "LM_HEAD", "MAX_SPECULATIVE_TOKENS", "Bucket", "BuildContext",
    "CheckpointInfo", "Commit", "ConfigError", "CostCurve", "DraftModelFields", "Drafts", "KVSpec",
    "LengthFields", "Match", "Memory", "Needs", "Place", "PlanContext", "Probs", "Proposer", "ProposerSpec",
    "Ranks", "RequestInfo", "Resources", "Shape", "SpecdecodeError", "StepSource", "StepView", "Tap",
    "TargetHandle", "TargetInfo", "TargetTokenizer", "TargetUpdate", "TensorInfo", "TokenizerEntries",
    "Tokens", "Undeclared", "Unsupported", "never", "option", "within",
]  # fmt: skip
