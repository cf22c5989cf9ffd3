"""Counters beside vLLM's own, at /metrics."""

from prometheus_client import Counter, Gauge, Histogram

SWAPS = Counter("qerl:swaps", "Changes of the policy that were made.", ["kind"])
REFUSALS = Counter("qerl:refusals", "Requests to /v1/qerl that were refused.", ["reason"])
SECONDS = Histogram(
    "qerl:swap_seconds",
    "Seconds from the pause of the engine to its resumption.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60),
)
BYTES = Counter("qerl:swap_bytes", "Bytes of adapters received.")
VERSION = Gauge("qerl:policy_version", "The policy version that is served.", multiprocess_mode="mostrecent")
