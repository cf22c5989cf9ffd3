"""Engines whose workers are other processes: one worker, and two that share the model (tensor parallelism)."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from qerl_vllm_plugin.policy import Policy

TOLERANCE = 1e-4

DRIVER = '''
import json, sys
from pathlib import Path


def codes(worker):
    """Raw bytes of this rank's packed linears."""
    import torch

    model = worker.model_runner.get_model()
    return {
        name.replace(".base_layer", ""): bytes(p.data.contiguous().view(torch.uint8).numpy().tobytes()).hex()
        for name, p in model.named_parameters()
        if name.endswith((".weight_packed", ".weight_scale"))
    }


def main(folder, adapter, out, ranks, options, prompts):
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    from qerl_vllm_plugin.adapter import AdapterError
    from qerl_vllm_plugin.policy import Policy

    llm = LLM(
        model=folder, quantization="qerl_nvfp4", enforce_eager=True, max_model_len=128, max_num_seqs=8, seed=0,
        num_gpu_blocks_override=64, tensor_parallel_size=int(ranks), disable_log_stats=True, **json.loads(options),
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def answers(policy):
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=policy.request)
        return [
            output.prompt_logprobs[i][ids[i]].logprob
            for ids, output in zip(prompts, outputs)
            for i in range(1, len(ids))
        ]

    policy = Policy(llm)
    found = {"base": answers(policy), "codes": llm.collective_rpc(codes), "bits": [policy.state(digest=True)]}
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    shared = next(name for name in tensors if "layers.0.self_attn.q_proj.lora_A" in name)
    tensors[shared.replace("q_proj", "v_proj")] = tensors[shared]  # one tensor under two names
    policy.swap(tensors, config)
    found["adapter"] = answers(policy)
    before = policy.state(digest=True)
    for broken in ({**config, "r": 64}, {**config, "target_modules": "("}):
        try:
            policy.swap(tensors, broken)
        except AdapterError as error:
            found.setdefault("refused", []).append(str(error))
    assert policy.state(digest=True) == before
    found["touched"] = policy.set_noise(0.05, seed=3, rollout=4).touched
    found["digests"] = [state["norms"] for state in llm.collective_rpc("qerl_state", args=(True,))]
    found["noise"] = answers(policy)
    policy.clear_noise()
    found["cleared"] = answers(policy)
    policy.swap(None)
    found["removed"] = answers(policy)
    found["version"] = policy.version
    found["bits"] = [(state.norms, state.adapter) for state in (*found["bits"], policy.state(digest=True))]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:6], json.loads(sys.argv[6]))
'''


MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def kv_heads(request) -> int:
    """With one key/value head, both ranks of tensor parallelism hold a copy of it."""
    return request.param


@pytest.fixture(scope="module")
def folder(make_bf16, write_packed, kv_heads):
    return write_packed(make_bf16("qwen2", num_key_value_heads=kv_heads))


@pytest.fixture(scope="module")
def adapter(folder, reference, make_adapter, tmp_path_factory):
    """An adapter folder in which q_proj and v_proj of layer 0 have the same A."""
    path = tmp_path_factory.mktemp("adapter")
    tensors, _, peft_model = make_adapter(reference(folder), target_modules=MODULES)
    peft_model.save_pretrained(path)
    for name in list(tensors):
        if "layers.0.self_attn.q_proj.lora_A" in name:
            tensors[name.replace("q_proj", "v_proj")] = tensors[name].clone()
    save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.fixture(scope="module")
def alone(boot, folder, adapter, lora_options, measure):
    """The answers of an engine in this process."""
    engine = boot(folder, **lora_options)
    policy = Policy(engine)
    found = {"base": measure.engine(engine, policy.request)}
    policy.swap_folder(adapter)
    found["adapter"] = measure.engine(engine, policy.request)
    policy.set_noise(0.05, seed=3, rollout=4)
    found["noise"], found["norms"] = measure.engine(engine, policy.request), policy.state(digest=True).norms
    return found


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kv_heads", "ranks"),
    [(2, 1), (2, 2), (1, 2)],
    ids=["one_rank", "two_ranks", "two_ranks_one_kv_head"],
    indirect=["kv_heads"],
    scope="module",
)
def test_workers_in_other_processes_serve_the_same_policy(
    ranks, kv_heads, carriers, make_bf16, folder, adapter, alone, measure, tmp_path
):
    # both carriers meet two ranks; with a replicated head, the ranks also quantize on the way in
    options = carriers["lora" if (ranks, kv_heads) == (2, 2) else "resident"]
    source = make_bf16("qwen2", num_key_value_heads=1) if (ranks, kv_heads) == (2, 1) else folder
    script, out = tmp_path / "driver.py", tmp_path / "found.json"
    script.write_text(DRIVER)
    changes = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the driver sends a function to the workers
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would want a NUMA node for each rank
    }
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"} | changes
    line = [sys.executable, str(script), str(source), str(adapter), str(out), str(ranks), json.dumps(options)]
    log = tmp_path / "log"
    with log.open("w") as stream:
        driver = subprocess.Popen(
            [*line, json.dumps(measure.prompts)], env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        code = driver.wait(500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)  # its workers would outlive it
    assert code == 0, log.read_text()[-6000:]
    found = json.loads(out.read_text())
    for which in ("base", "adapter", "noise"):
        assert measure.difference(torch.tensor(found[which]), alone[which]) < TOLERANCE, which
    assert measure.difference(alone["adapter"], alone["base"]) > 100 * TOLERANCE
    assert measure.difference(alone["noise"], alone["adapter"]) > 10 * TOLERANCE
    assert found["bits"][0] == found["bits"][1]  # answers may differ in rounding: requests arrive in other batches
    for after, before in (("cleared", "adapter"), ("removed", "base")):
        assert measure.difference(torch.tensor(found[after]), torch.tensor(found[before])) < TOLERANCE
    assert found["digests"] == [alone["norms"]] * ranks
    assert (found["touched"], found["version"], len(found["refused"])) == (4, 2, 2)
    assert_shards_are_slices(found["codes"], load_file(folder / "model.safetensors"), ranks, kv_heads)


def assert_shards_are_slices(
    ranks_found: list[dict[str, str]], stored: dict[str, torch.Tensor], ranks: int, kv_heads: int
) -> None:
    """Each rank holds its rows (or, behind the sum over ranks, its columns) of the checkpoint's bytes, nothing else."""
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    assert len(ranks_found) == ranks
    for rank, found in enumerate(ranks_found):
        assert len(found) == 2 * 4 * 2
        for name, ours in found.items():
            module, tensor = name.rsplit(".", 1)
            parent, last = module.rsplit(".", 1)
            parts = []
            for part in fused.get(last, [last]):
                whole = stored[f"{parent}.{part}.{tensor}"]
                is_replicated = part in ("k_proj", "v_proj") and kv_heads < ranks
                parts.append(whole if is_replicated else whole.chunk(ranks, 0 if last in fused else 1)[rank])
            theirs = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
            assert bytes.fromhex(ours) == theirs.numpy().tobytes(), (rank, name)
