"""The name under which plugins and core meet: entry-point group, hook prefix and markers."""

from __future__ import annotations

import pluggy

#: Entry-point group, and pluggy's project name.
GROUP = "specdecode"
#: What the name of every hook starts with.
PREFIX = "specdecode_"

hookspec = pluggy.HookspecMarker(GROUP)
#: Marks a plugin's implementation of a hook.
hookimpl = pluggy.HookimplMarker(GROUP)
