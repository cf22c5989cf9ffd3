"""Set what vLLM needs on a CPU before anything imports it, and make tiny checkpoints that every test may use."""

import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import straw

from qerl_recipes.machine import processes
from qerl_recipes.machine.environment import prepare, runs_on_cuda

prepare()  # must run before anything imports vllm
if not runs_on_cuda(os.environ):
    FIRST = Path(__file__).parent / "fixtures" / "processes" / "sitecustomize.py"
    runpy.run_path(str(FIRST))  # PYTHONPATH below does the same for the processes that tests start
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FIRST.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
# a shell's background jobs ignore SIGINT, and child processes would inherit that
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with contextlib.suppress(ImportError):  # a machine with a GPU may lack hypothesis
    import hypothesis

    # the default of 200 ms is too short on a busy machine
    hypothesis.settings.register_profile("any machine", deadline=None)
    hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=5_000)  # for make fuzz
    hypothesis.settings.load_profile("any machine")

Make = Callable[..., Path]


def scope(path: Path) -> Path:
    """Return what one worker runs as a whole: a file, or a folder that is a package, whose tests share a server."""
    return path.parent if (path.parent / "__init__.py").is_file() else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, and run what takes longest first.

    No worker should have a long file left when the others have nothing to do. A cost is a rough number of hundredths of
    a second.
    """
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in of_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run tests/gpu/run.sh there"))
    cost: Counter[Path] = Counter()
    for item in items:
        has_engine = {"make_trainer", "make_module_trainer", "boot"} & {*getattr(item, "fixturenames", ())}
        cost[scope(item.path)] += 500 if item.get_closest_marker("integration") else 100 if has_engine else 2
    items.sort(key=lambda item: -cost[scope(item.path)])


@pytest.hookimpl(optionalhook=True)  # this hook exists only with xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, give each ``scope`` to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadPackageScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(scope(config.rootpath / super()._split_scope(nodeid)))

    return LoadPackageScheduling(config, log)


@pytest.fixture(scope="session")
def light_engines() -> Iterator[None]:
    """Let engines in this process start with less work that only large models and GPUs need.

    vLLM inspects model classes in a new process, to avoid initializing CUDA. That process imports all of vLLM again,
    which takes 12 CPU seconds an architecture and xdist worker on a machine whose user has no cache of the results.
    Every engine writes zeros to its KV cache of a GiB, and looks through all modules for Triton's kernels, though the
    first has replaced them. These take half a second an engine. Every engine and trainer also reads the metadata of all
    installed packages again, for plugins and for what is installed, and every unwrapping looks through the model for
    compiled parts. These take a tenth of a short training.
    """
    import accelerate.utils.imports
    import accelerate.utils.other
    from vllm.model_executor.models import registry
    from vllm.platforms import cpu, current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        patch.setattr(cpu, "GiB_bytes", 1 << 25)
        for module, name in ((importlib.metadata, "entry_points"), (accelerate.utils.imports, "_is_package_available")):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        patch.setattr(accelerate.utils.other, "has_compiled_regions", lambda model: False)
        assert accelerate.utils.imports.is_peft_available()  # remembered before a test hides packages
        replace = current_platform.register_triton_kernel_overrides
        if replace is not None:  # older releases have no such method
            patch.setattr(current_platform, "register_triton_kernel_overrides", functools.cache(replace))
        yield


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Restore torch's default dtype after each test.

    vLLM before 0.30 leaves it changed when it refuses a model (``set_default_torch_dtype``). The next engine of the
    process would round its log-probabilities to it.
    """
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def torchvision() -> Iterator[None]:
    """Stand in for torchvision, which vLLM imports for the vision half of Qwen3.5 and the text model does not need."""
    import vllm.entrypoints.llm  # noqa: F401  by now transformers has looked for the real torchvision

    with pytest.MonkeyPatch.context() as patch:
        for name, module in straw.modules().items():
            patch.setitem(sys.modules, name, module)
        yield


@contextlib.contextmanager
def as_vllm_left_them(config: object) -> Iterator[None]:
    """Set vLLM's config while a model of ``config`` is built.

    vLLM runs OLMo 2 and SmolLM3 with transformers' own classes and patches them for the whole process. From then on
    they ask for a config of vLLM's.
    """
    if "vllm.compilation.decorators" not in sys.modules:
        yield
        return
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

    vllm_config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    object.__setattr__(vllm_config, "model_config", types.SimpleNamespace(hf_config=config))
    with set_current_vllm_config(vllm_config):
        yield


@pytest.fixture(scope="session")
def building() -> Callable[[object], contextlib.AbstractContextManager[None]]:
    """Return building(config), a context in which transformers' models can be built whatever an engine here has run."""
    return as_vllm_left_them


# what the tiny checkpoints of some families need beside the common sizes
OWN_SIZES: dict[str, dict[str, object]] = {
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "granite": {
        "attention_multiplier": 0.17,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
    },
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_5_text": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 0]},
}


@pytest.fixture(scope="session")
def make_bf16(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return make_bf16("qwen2", **config), which writes a random BF16 checkpoint of that architecture with a tokenizer.

    Norm weights are random: with ones, a norm that is skipped or rounded twice would go unnoticed.
    """
    import torch
    import transformers

    from qerl_recipes.tasks.running_sum import tokenizer

    made: dict[str, Path] = {}

    def make(architecture: str, **changes: object) -> Path:
        key = json.dumps([architecture, changes], sort_keys=True)
        if key in made:
            return made[key]
        sizes: dict[str, object] = {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        if architecture in ("qwen2", "phi3", "granite", "olmo2", "smollm3"):
            del sizes["head_dim"]
            sizes["num_attention_heads"] = 2
        sizes |= OWN_SIZES.get(architecture, {}) | changes
        config = transformers.AutoConfig.for_model(architecture, **sizes)
        torch.manual_seed(7)
        with as_vllm_left_them(config):
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "norm" in parameter_name:
                    parameter.copy_(1 + 0.3 * noise)
                elif parameter_name.endswith(("bias", "A_log")):
                    parameter.copy_(0.5 * noise)
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5 * 1.5)
        folder = tmp_path_factory.mktemp(architecture) / "bf16"
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        made[key] = folder
        return folder

    return make


@pytest.fixture(scope="session")
def make_nvfp4(make_bf16: Make, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return make_nvfp4("qwen2", **config), which gives the folder of the same checkpoint, quantized."""
    import transformers

    from qerl_recipes.convert.quantize import quantize_checkpoint

    def make(architecture: str, **changes: object) -> Path:
        source = make_bf16(architecture, **changes)
        destination = source.parent / "nvfp4"
        if not destination.exists():
            with as_vllm_left_them(transformers.AutoConfig.from_pretrained(source)):
                quantize_checkpoint(source, destination)
        return destination

    return make


@pytest.fixture(scope="session")
def engine_options(light_engines: None) -> dict[str, object]:
    """Return the options of every test engine on a CPU."""
    return {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "disable_log_stats": True,
        "seed": 0,
    }


@pytest.fixture(scope="session")
def hold_port() -> Iterator[Callable[[], int]]:
    """Return hold_port(), which gives a port of 127.0.0.1 that a server may bind.

    The port stays bound here, so that nobody else gets it.
    """
    with contextlib.ExitStack() as held:

        def hold() -> int:
            port = held.enter_context(socket.socket())
            # Servers set this option; both sockets that bind the port need it.
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            return port.getsockname()[1]

        yield hold


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return start_process(command, log, **environment), which starts a process.

    It ends the process, with its children, after the test. Its output goes to the file ``log``.
    ``environment`` is added to the tests' own environment, without the settings for their engines.
    """
    started = []

    def start(command: Sequence[str | Path], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        started.append(processes.start(command, log, environment))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def run_process(start_process: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., None]:
    """Return run_process(command, log, seconds=280, **environment), which runs a process to its end and asserts
    success.
    """

    def run(command: Sequence[str | Path], log: Path, seconds: float = 280, **environment: str) -> None:
        process = start_process(command, log, **environment)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        assert process.returncode == 0, log.read_text()[-6000:]

    return run


@pytest.fixture(scope="session")
def verl_on_a_cpu() -> Iterator[None]:
    """Use verl with the platform of tests/fixtures/verl; skip where verl is not installed.

    The environment of requirements-cpu.lock leaves it out, since verl needs an older transformers and a much older TRL.
    """
    # verl asks for the version of a distribution named vllm, but the CPU wheel has another name
    for name in ("verl", "vllm"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"no distribution named {name} is installed (qerl_vllm_plugin/verl.md)")
    folder = str(Path(__file__).parent / "fixtures" / "verl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "qerl_verl_cpu")
        patch.setattr(sys, "path", [folder, *sys.path])
        importlib.import_module("verl")
        yield
