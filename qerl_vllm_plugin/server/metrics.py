"""Count changes and refusals, beside vLLM's own metrics at /metrics."""

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.prometheus import get_prometheus_registry

SWAPS = Counter("qerl:swaps", "Changes of the policy that were made.", ["kind"])
REFUSALS = Counter("qerl:refusals", "Requests to /v1/qerl that were refused.", ["reason"])
SECONDS = Histogram(
    "qerl:swap_seconds",
    "Seconds from the pause of the engine to its resumption.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60),
)
BYTES = Counter("qerl:swap_bytes", "Bytes of adapters received.")
VERSION = Gauge("qerl:policy_version", "The policy version that is served.", multiprocess_mode="mostrecent")


def counted() -> dict[str, Any]:
    """Return the counters as /metrics shows them, summed over all API server processes."""
    swaps: dict[str, int] = {}
    refusals: dict[str, int] = {}
    sums = {"qerl:swap_seconds_sum": 0.0, "qerl:swap_bytes_total": 0.0}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples if metric.name.startswith("qerl:") else ():
            if sample.name == "qerl:swaps_total":
                swaps[sample.labels["kind"]] = int(sample.value)
            elif sample.name == "qerl:refusals_total":
                refusals[sample.labels["reason"]] = int(sample.value)
            elif sample.name in sums:
                sums[sample.name] = sample.value
    seconds, size = sums.values()
    return {"swaps": swaps, "refusals": refusals, "seconds": round(seconds, 4), "bytes": int(size)}
