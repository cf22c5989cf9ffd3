"""Settings that vLLM needs on a CPU, before anything imports it, and tiny checkpoints that every test may use."""

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
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

from qerl_recipes.machine import processes
from qerl_recipes.machine.environment import prepare, runs_on_cuda

prepare()  # before anything imports vllm
if not runs_on_cuda(os.environ):
    FIRST = Path(__file__).parent / "fixtures" / "processes" / "sitecustomize.py"
    runpy.run_path(str(FIRST))  # and in the processes that tests start
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FIRST.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a shell; processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with contextlib.suppress(ImportError):  # a machine with a GPU may do without
    import hypothesis

    hypothesis.settings.register_profile("any machine", deadline=None)  # 200 ms are not enough where others are at work
    hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=5_000)  # make fuzz
    hypothesis.settings.load_profile("any machine")

Make = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped where there is none. Files with integration tests first: with two workers, none of them
    should be what the other waits for.
    """
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in of_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run tests/gpu/run.sh there"))
    count = Counter(item.path for item in items if item.get_closest_marker("integration"))
    items.sort(key=lambda item: -count[item.path])


@pytest.hookimpl(optionalhook=True)  # without xdist there is nothing to schedule
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, a folder that is a package goes to one worker as a whole: its tests share a server."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadPackageScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            return folder if (config.rootpath / folder / "__init__.py").is_file() else file

    return LoadPackageScheduling(config, log)


@pytest.fixture(scope="session")
def classes_looked_at_here() -> Iterator[None]:
    """vLLM looks at the class of a model in this process, not in one of its own that imports all of vLLM once more.

    It keeps what it finds in the user's cache: without this, the first tests on a machine take 12 CPU seconds longer
    for each architecture and each worker of xdist. (It does so lest CUDA is initialized, which no CPU has.)
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


class Straw(types.ModuleType):
    """A package whose attributes are classes that nobody calls."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """vLLM before 0.30 leaves torch's default dtype changed when a model is refused (``set_default_torch_dtype``), and
    the next engine of the process then rounds its log-probabilities to it."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def torchvision() -> Iterator[None]:
    """vLLM imports torchvision for the vision half of Qwen3.5, and the text model needs nothing of it."""
    import vllm.entrypoints.llm  # noqa: F401  transformers has looked for the real one by now

    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional", ".io"):
                module = Straw(f"torchvision{name}")
                module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
                patch.setitem(sys.modules, module.__name__, module)
        yield


@contextlib.contextmanager
def as_vllm_left_them(config: object) -> Iterator[None]:
    """For building a model of ``config``: vLLM runs OLMo 2 and SmolLM3 by transformers' own classes, which it changes
    for the whole process, so that from then on they ask for a config of vLLM's."""
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
    """``with building(config):`` transformers' models can be built, whatever an engine of this process has run."""
    return as_vllm_left_them


@pytest.fixture(scope="session")
def make_bf16(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make_bf16("qwen2", **config) -> folder of a random BF16 checkpoint of that architecture with a tokenizer.

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
        if architecture == "qwen3_moe":
            sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        if architecture == "qwen3_5_text":
            sizes |= {
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "layer_types": ["linear_attention", "full_attention"],
            }
        config = transformers.AutoConfig.for_model(architecture, **{**sizes, **changes})
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
    """make_nvfp4("qwen2", **config) -> folder of the same checkpoint, quantized."""
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
def engine_options(classes_looked_at_here: None) -> dict[str, object]:
    """What every test engine on a CPU is started with."""
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
    """hold_port() -> a port of 127.0.0.1 that a server may bind and nobody else is given: it stays bound here."""
    with contextlib.ExitStack() as held:

        def hold() -> int:
            port = held.enter_context(socket.socket())
            # as servers do: both who bind it must ask for it
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(("127.0.0.1", 0))
            return port.getsockname()[1]

        yield hold


@pytest.fixture
def start_process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """start_process(command, log, **environment) -> the process; with the test it ends, and all that it has started.

    Its output goes to the file ``log``; ``environment`` is added to that of the tests, less what is their engines'.
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
    """run_process(command, log, seconds=280, **environment) runs it to its end, which must be a good one."""

    def run(command: Sequence[str | Path], log: Path, seconds: float = 280, **environment: str) -> None:
        process = start_process(command, log, **environment)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        assert process.returncode == 0, log.read_text()[-6000:]

    return run


@pytest.fixture(scope="session")
def verl_on_a_cpu() -> Iterator[None]:
    """verl with the platform of tests/fixtures/verl; skips where it is not installed, which the environment of
    requirements-cpu.lock leaves out: verl wants an older transformers, and no TRL of these years."""
    for name in ("verl", "vllm"):  # verl asks for the version of a distribution of this name; the CPU wheel has another
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
