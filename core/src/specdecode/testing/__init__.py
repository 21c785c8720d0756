"""Conformance kit, tiny models, scripted proposers and reference decoders for tests."""
