"""Name the environment that OpenReward's server serves."""

from trl.experimental.openreward import OpenRewardSpec

spec = OpenRewardSpec("http://127.0.0.1:8080")
