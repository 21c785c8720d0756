"""A new draft method's distribution, from the template beside this file."""

from .rendering import new_plugin

__all__ = ["new_plugin"]
