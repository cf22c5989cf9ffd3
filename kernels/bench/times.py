"""Configurations and launches as the tuners name them in their files of times, and as the table has them."""

import json
from dataclasses import astuple

from qerl_kernels import gemm


def name_of(configuration: gemm.Configuration) -> str:
    """Its fields in order."""
    return json.dumps(astuple(configuration))


def configuration(name: str) -> gemm.Configuration:
    """What ``name_of`` has named."""
    return gemm.Configuration(*json.loads(name))


def ours(us: dict[str, float]) -> dict[str, float]:
    """Of one row of tune.json the times of our own configurations."""
    return {name: time for name, time in us.items() if name.startswith("[")}
