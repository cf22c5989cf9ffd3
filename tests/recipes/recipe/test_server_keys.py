"""The keys of vllm_mode: server: honoured, refused by name, or said to be without effect."""

import pytest

from qerl_recipes.files.run_state import changes, recorded
from qerl_recipes.model import shared_weights
from qerl_recipes.recipe.configs import parse
from qerl_recipes.recipe.file import ConfigError
from qerl_recipes.train.preflight import check

TOKEN = "an-admin-token-of-32-characters!"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.delenv("QERL_ADMIN_TOKEN_FILE", raising=False)
    monkeypatch.setenv("QERL_ADMIN_TOKEN", TOKEN)


@pytest.fixture
def recipe(make_nvfp4, tmp_path):
    """recipe(*flags) -> the three parts of one with rollouts from a server."""

    def make(*flags):
        data = ["--dataset_name", "running_sum", "--dataset_size", "16", "--reward_funcs", "running_sum_correct"]
        base = ["--model_name_or_path", str(make_nvfp4("qwen2")), "--output_dir", str(tmp_path / "run")]
        own = ["--report_to", "none", "--max_completion_length", "32", "--vllm_mode", "server"]
        return parse([*data, *base, *own, *flags])

    return make


def test_a_server_is_found_under_trls_keys(recipe):
    addresses = {
        (): "http://0.0.0.0:8000",
        ("--vllm_server_host", "gpu1", "--vllm_server_port", "9000"): "http://gpu1:9000",
        ("--vllm_server_base_url", "https://gpu1/rollouts/"): "https://gpu1/rollouts",
        ("--vllm_server_base_url", "http://gpu1:9000/v1"): "http://gpu1:9000",
        ("--vllm_server_base_url", "http://[::1]:9000"): "http://[::1]:9000",
        ("--vllm_server_host", "::1", "--vllm_server_port", "9000"): "http://[::1]:9000",
    }
    for flags, address in addresses.items():
        parts = recipe(*flags)
        check(*parts)
        assert parts[1].server_address == address


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantization", "bf16"], "which only qerl_nvfp4 has, not quantization: bf16; use vllm_mode: colocate"),
        (["--rollout_engine", "sglang"], "vllm_mode: server is a mode of rollout_engine: vllm, not of sglang"),
        (
            ["--share_weights", "true"],
            "share_weights: vllm_mode: server: the engine's are in another process; use shar",
        ),
        (["--vllm_tensor_parallel_size", "2"], "start the server with --tensor-parallel-size 2, and remove the key"),
        (["--vllm_server_timeout", "0"], "vllm_server_timeout must be above 0 seconds, not 0"),
        (["--vllm_server_base_url", "gpu1:8000"], "'gpu1:8000' is no address; it looks like http://127.0.0.1:8000"),
        (["--vllm_server_base_url", "http://gpu1:80000"], "'http://gpu1:80000' is no address"),
        (["--vllm_server_base_url", "http://gpu1:8000\n"], r"'http://gpu1:8000\n' is no address"),
        (["--vllm_server_host", "http://gpu1"], "gives http://[http://gpu1]:8000, which is no address; a host is a"),
        (
            ["--vllm_server_base_url", "http://gpu1", "--vllm_server_port", "1"],
            "vllm_server_port: 1 would be ignored beside vllm_server_base_url; remove one of the two",
        ),
        (
            ["--generation_kwargs", '{"detokenize": true}'],
            "a request to a server cannot carry detokenize; it can allow",
        ),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, list) else "",
)
def test_what_a_server_cannot_do_is_refused_by_name(flags, message, recipe):
    with pytest.raises(ConfigError) as refused:
        check(*recipe(*flags))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "under the server's admin token; export QERL_ADMIN_TOKEN_FILE=FILE or QERL_ADMIN_TOKEN, the same"),
        ({"QERL_ADMIN_TOKEN": "short"}, "vllm_mode: server: the token of QERL_ADMIN_TOKEN is too short"),
        ({"QERL_ADMIN_TOKEN_FILE": "/no/such/file"}, "QERL_ADMIN_TOKEN_FILE: /no/such/file cannot be read"),
    ],
    ids=["none", "short", "no file"],
)
def test_without_the_admin_token_nothing_begins(variables, message, recipe, monkeypatch):
    monkeypatch.delenv("QERL_ADMIN_TOKEN")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        check(*recipe())
    assert message in str(refused.value)
    check(*recipe("--vllm_mode", "colocate"))


def test_what_is_said_to_an_engine_alone_has_no_effect_and_is_named(recipe, recwarn):
    check(*recipe("--vllm_enable_sleep_mode", "true", "--vllm_gpu_memory_utilization", "0.5"))
    (said,) = [str(warning.message) for warning in recwarn if "has no effect" in str(warning.message)]
    assert "vllm_gpu_memory_utilization: 0.5 has no effect with vllm_mode: server (--gpu-memory-utilization of" in said
    assert "vllm_enable_sleep_mode: True has no effect" in said
    recwarn.clear()
    check(*recipe())
    assert not [warning for warning in recwarn if "has no effect" in str(warning.message)]


def test_a_run_may_go_on_with_another_server_or_in_process_and_no_address_is_written_down(recipe):
    before = recorded(*recipe("--vllm_server_base_url", "http://gpu1.internal:9000"))
    assert "internal" not in str(before) and before["vllm_mode"] == "server"
    assert list(changes(before, recorded(*recipe("--vllm_mode", "colocate")))) == []
    assert list(changes(before, recorded(*recipe("--temperature", "0.5")))) == ["temperature was 1.0 and is 0.5"]


def test_a_trainer_beside_a_server_has_its_own_weights_without_being_told_so(recipe, recwarn):
    training = recipe()[1]
    assert not shared_weights.is_wanted(training)
    assert not [warning for warning in recwarn if "own copy" in str(warning.message)]
