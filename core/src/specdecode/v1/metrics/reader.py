"""The kinds of metrics, under the module name that scripts for vLLM import them from."""

from ...engine.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
