"""Scripted proposers: every kind of drafter the contract serves, and some that break it, for tests.

They reach the engine as an installed plugin's would: :func:`install` registers them with the plugin
manager, and ``speculative_config={"method": "scripted-oracle", ...}`` names one.
"""

from .plugin import ScriptedPlugin, install

__all__ = ["ScriptedPlugin", "install"]
