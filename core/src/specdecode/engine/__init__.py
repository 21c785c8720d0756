"""The engine: scheduler, step loop, drafting, outputs, metrics."""
