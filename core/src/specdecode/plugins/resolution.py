"""From a method's name, or a draft checkpoint, to the one plugin that provides it; or the reason why not."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence

from packaging.utils import canonicalize_name

from specdecode.contract import CheckpointInfo, ConfigError, Match
from specdecode.contract.errors import FAULTS

from .errors import PluginError
from .hints import known_methods
from .records import PluginRecord, Provided, Status

_log = logging.getLogger(__name__)

_DID_NOT_LOAD = (Status.BROKEN, Status.BLOCKED, Status.INCOMPATIBLE)


def resolve(
    method: str, provided: Sequence[Provided], records: Sequence[PluginRecord], field: str
) -> Provided:
    """See :meth:`specdecode.plugins.PluginManager.resolve`."""
    source, _, name = method.rpartition(":")
    matches = [p for p in provided if p.spec.name == name and (not source or _from(p.dist, p.family, source))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(
            f"{field} {method!r} is provided by {_listed(matches)}; say {_choices(matches)}, "
            "or disable one of them"
        )
    if reason := _did_not_load(source, name, records):
        raise ConfigError(f"{field} {method!r} cannot be used: {reason}")
    raise ConfigError(_unknown(source, name, provided, records, field))


def _from(dist: str, family: str, source: str) -> bool:
    return canonicalize_name(source) in (canonicalize_name(dist), canonicalize_name(family))


def _listed(matches: Sequence[Provided]) -> str:
    return " and ".join(f"{p.provider} (plugin {p.family})" for p in matches)


def _choices(matches: Sequence[Provided]) -> str:
    """What to type for each: its family where the distribution does not tell them apart."""
    dists = [p.dist for p in matches]
    return " or ".join(
        repr(f"{p.dist if dists.count(p.dist) == 1 else p.family}:{p.spec.name}") for p in matches
    )


def _did_not_load(source: str, name: str, records: Sequence[PluginRecord]) -> str:
    """The reason of the provider that would have the method, had it loaded."""
    carrier = known_methods().get(name)
    for record in records:
        if record.status not in _DID_NOT_LOAD or (source and not _from(record.dist, record.name, source)):
            continue
        if source or name in (record.name, *record.methods) or record.dist == carrier:
            return (
                f"plugin {record.name} of {record.dist} {record.version} is {record.status}: {record.detail}"
            )
    return ""


def _unknown(
    source: str, name: str, provided: Sequence[Provided], records: Sequence[PluginRecord], field: str
) -> str:
    installed = sorted({p.spec.name for p in provided})
    hints = known_methods()
    asked = f"{field} {f'{source}:{name}' if source else name!r}"
    if source and any(_from(record.dist, record.name, source) for record in records):
        offered = sorted({p.spec.name for p in provided if _from(p.dist, p.family, source)})
        reason = f"{asked} does not exist: {source} provides {', '.join(offered) or 'nothing'}."
    elif name in hints:
        upgrade = "--upgrade " if any(record.dist == hints[name] for record in records) else ""
        reason = f"{asked} is not installed: pip install {upgrade}{hints[name]}."
    elif near := difflib.get_close_matches(name, {*installed, *hints}, n=2):
        reason = f"{asked} is unknown: did you mean {' or '.join(_with_remedy(n, installed) for n in near)}?"
    else:
        reason = f"{asked} is unknown."
    failed = [
        f"{r.name} ({r.dist} {r.version}) is {r.status}"
        for r in records
        if r.status in (Status.BROKEN, Status.INCOMPATIBLE)
    ]
    return f"{reason} Installed methods: {', '.join(installed) or 'none'}." + (
        f" Not loaded: {', '.join(failed)}; see `specdecode plugins list`." if failed else ""
    )


def _with_remedy(name: str, installed: Sequence[str]) -> str:
    return repr(name) if name in installed else f"{name!r} (pip install {known_methods()[name]})"


def recognize(checkpoint: CheckpointInfo, provided: Sequence[Provided], *, strict: bool) -> Provided:
    """See :meth:`specdecode.plugins.PluginManager.recognize`."""
    matches: list[tuple[Provided, Match]] = []
    failed: list[str] = []
    for candidate in provided:
        try:
            match = candidate.spec.recognize(checkpoint)
            if match is not None and not isinstance(match, Match):
                raise PluginError(f"recognize must give a Match or None, got {type(match).__name__}")
        except FAULTS as error:
            if strict:
                raise
            failed.append(f"{candidate.spec.name} ({candidate.provider}): {type(error).__name__}: {error}")
            _log.error("recognize of %s", failed[-1])
            continue
        if match is not None:
            matches.append((candidate, match))
    if len(matches) == 1:
        return matches[0][0]
    if matches:
        reasons = " and ".join(f"{p.spec.name} of {p.provider} ({match.reason})" for p, match in matches)
        choices = _choices([p for p, _ in matches])
        raise ConfigError(
            f"the draft checkpoint {checkpoint.path} is claimed by {reasons}; set method to {choices}"
        )
    asked = ", ".join(sorted({p.spec.name for p in provided})) or "none"
    architectures = checkpoint.config.get("architectures") or checkpoint.config.get("model_type") or "nothing"
    raise ConfigError(
        f"no installed method recognises the draft checkpoint {checkpoint.path} "
        f"(its config says {architectures}, it holds {len(checkpoint.tensors)} tensors); "
        f"asked: {asked}; set method" + (f"; could not tell: {'; '.join(failed)}" if failed else "")
    )
