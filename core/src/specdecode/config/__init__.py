"""Configuration: mappings become frozen attrs classes, and all faults are told at once."""

from .fields import ConfigField, fields_of
from .speculative import Policy, SpeculativeConfig
from .structure import structure

__all__ = ["ConfigField", "Policy", "SpeculativeConfig", "fields_of", "structure"]
