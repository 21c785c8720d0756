"""Runs the target over a step's plan."""
