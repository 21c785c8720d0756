"""What the method declares for a target, before anything heavy is imported."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from ....contract import ConfigError, Needs, TargetInfo, Unsupported
from ....plugins import PluginError, prepare
from ..checks import Broken, Group

if TYPE_CHECKING:
    from ..subject import Subject

GROUP = Group("needs", order=30)

#: Core reads the headers of a draft checkpoint for ``needs``, with numpy.
_HEAVY = ("torch", "transformers", "triton", "jax", "tensorflow")

#: Targets that few methods were made for.
_STRANGE: dict[str, dict[str, Any]] = {
    "a single layer": {"num_layers": 1},
    "a tiny context": {"max_model_len": 2},
    "a tiny vocabulary": {"vocab_size": 2},
    "two ranks": {"tensor_parallel_size": 2},
    "one head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "hidden_size": 8},
    "another architecture": {"architecture": "NobodysForCausalLM", "config": {}},
    "another dtype": {"dtype": "bfloat16"},
}


def _needs(subject: Subject, target: TargetInfo) -> Needs:
    return prepare(subject.manager, subject.mapping, target).needs


@GROUP.check("pure", "``needs`` is pure and torch-free")
def pure(subject: Subject) -> str | None:
    """Asked again, and of equal values, it says the same and changes nothing."""
    target = subject.toy.info
    copies = target, subject.prepared.config
    before = tuple(map(repr, copies))
    for _ in range(3):
        again = _needs(subject, attrs.evolve(target))
        if again != subject.needs:
            raise Broken(f"the same question has two answers: {subject.needs} and {again}")
    if tuple(map(repr, copies)) != before:
        raise Broken("it changes the config or the target that it is shown")
    return None


@GROUP.check("torch-free", "``needs`` is pure and torch-free")
def torch_free(subject: Subject) -> str | None:
    with _imports() as imported:
        _needs(subject, subject.toy.info)
    heavy = sorted(set(imported) & set(_HEAVY))
    if heavy:
        raise Broken(f"it imports {', '.join(heavy)}")
    return None


@GROUP.check("refuses-with-a-reason", "raises :class:`Unsupported` with a reason")
def refuses_with_a_reason(subject: Subject) -> str | None:
    """Targets that it was not made for: needs, or a refusal that says why."""
    for what, changes in _STRANGE.items():
        try:
            _needs(subject, attrs.evolve(subject.toy.info, **changes))
        except (Unsupported, ConfigError) as refusal:
            if not str(refusal.__cause__ or refusal).strip():
                raise Broken(f"a target with {what} is refused without a reason") from refusal
        except PluginError as error:
            raise Broken(f"a target with {what}: {error}") from error
    return None


@contextmanager
def _imports() -> Iterator[list[str]]:
    """Top-level names of what is imported meanwhile, also of what this process has imported before."""
    imported: list[str] = []
    real = builtins.__import__

    def watched(name: str, *arguments: Any, **keywords: Any) -> Any:
        imported.append(name.partition(".")[0])
        return real(name, *arguments, **keywords)

    builtins.__import__ = watched
    try:
        yield imported
    finally:
        builtins.__import__ = real
