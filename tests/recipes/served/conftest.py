"""Provide one real server of the tiny model with a chat template, for trainers and agents."""

import contextlib
from types import SimpleNamespace

import calling
import httpx
import pytest
from digit_rewards import digits_of_some
from waiting import PATIENCE, until

from qerl_recipes.machine import processes

# Both engines take one sequence at a time, because products of other batch sizes sometimes round differently.
ALONE = ("--max-num-seqs", "1", "--max-model-len", "256")
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # enables vLLM's own /pause and /resume
RUN = {
    "max_steps": 3,
    "max_completion_length": 10,
    "save_strategy": "steps",
    "save_steps": 1,
    "noise_mode": "both",
    "sigma_start": 0.1,
    "sigma_end": 0.1,
    "num_stages": 1,
    "dynamic_sampling": True,
    "train_norms": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


@pytest.fixture(autouse=True)
def with_the_token(admin_token):
    """Let each test know the server's token."""


@pytest.fixture(scope="package")
def running(serve_policy, make_nvfp4, hold_port, tmp_path_factory):
    """Start a server of the tiny model with a chat template.

    Return its ``model``, ``url`` and ``process``, ``restart()``, which starts another in its place, ``answers(url)``,
    and ``ready()``, which waits until it answers.
    """
    model = calling.recipe_keys(make_nvfp4("qwen2"), tmp_path_factory.mktemp("served"))["model_name_or_path"]
    port = hold_port()
    found = SimpleNamespace(model=model, url=f"http://127.0.0.1:{port}", alone=ALONE, answers=answers)

    def restart():
        found.process = serve_policy(model, port, *ALONE, **DEVELOPMENT)

    def ready():
        assert until(lambda: answers(found.url), 500), found.process.log.read_text()[-4000:]

    restart()
    found.restart, found.ready = restart, ready
    yield found
    processes.end(found.process)


def answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=PATIENCE).is_success


@pytest.fixture(scope="session")
def watched(make_nvfp4):
    """Return watched(make_trainer, folder, **settings), which makes a trainer that keeps completions in ``outputs``."""

    def make(make_trainer, folder, **settings):
        trainer = make_trainer(
            make_nvfp4("qwen2"), digits_of_some, rows=6, output_dir=str(folder), **{**RUN, **settings}
        )
        rollouts = trainer.vllm_generation
        generate, trainer.outputs, trainer.sigmas = rollouts.generate, [], set()

        def keep(**options):
            trainer.outputs.append(generate(**options))
            if hasattr(rollouts, "_pushed"):
                trainer.sigmas.add((trainer.model.training, rollouts._pushed.noise.sigma))
            return trainer.outputs[-1]

        trainer.vllm_generation.generate = keep
        return trainer

    return make


@pytest.fixture
def against(running, make_trainer, watched, tmp_path):
    """Return against(**settings), which makes a trainer with the server's rollouts."""

    def make(**settings):
        running.ready()
        # Wait twice as long as by default, because the server may restart while all other tests run.
        mode = {"vllm_mode": "server", "vllm_server_base_url": running.url, "vllm_server_timeout": 500}
        return watched(make_trainer, tmp_path / "run", **{**mode, **settings})

    return make
