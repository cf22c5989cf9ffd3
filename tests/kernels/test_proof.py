"""Test what a kernel variant must prove before it is used on a machine; plain torch stands in for the product."""

import contextlib
import functools
import warnings
from pathlib import Path

import pytest
import torch
from qerl_kernels import adapter, compiler, counters, gemm, linear_tiles, nvfp4, nvrtc, proof, rule, tiles

VARIANTS = list(rule.rule().variants)[:3]


def right(x, weight, configuration, bias=None, adapter=None, how=None):
    """Compute what the kernel should by the reference: fp32 sums and one rounding, with s rounded as it is."""
    assert (adapter is None) == (how is None), "the small kernel makes s, and cuBLAS is not on trial"
    y = x.float() @ tiles.dequantize(weight.tiles, weight.N, weight.K, weight.operand).float().t()
    if adapter is not None:
        y += (x @ adapter.a.t()).float() @ adapter.b.float().t()
    return y.to(x.dtype)


def without_adapter(x, weight, configuration, bias=None, adapter=None, how=None):
    return right(x, weight, configuration)


def one_code_wrong(x, weight, configuration, bias=None, adapter=None, how=None):
    y = right(x, weight, configuration, bias, adapter, how)
    return torch.where(y == 448 * 3, 448 * 2, y)


def one_token_lost(x, weight, configuration, bias=None, adapter=None, how=None):
    y = right(x, weight, configuration, bias, adapter, how)
    y[-1] = 0
    return y


def wrong_for_one_token(x, weight, configuration, bias=None, adapter=None, how=None):
    y = right(x, weight, configuration, bias, adapter, how)
    return y if len(x) > 1 else y + 1


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (right, None),
        (without_adapter, "adapter"),
        (one_code_wrong, "weight"),
        (one_token_lost, "weight"),
        (wrong_for_one_token, "weight"),
    ],
)
def test_a_variant_that_computes_something_else_is_found(operand, kernel, said, monkeypatch):
    monkeypatch.setattr(gemm, "product", kernel)
    given = proof.make(torch.device("cpu"), operand)
    found = proof.examine(VARIANTS[0], given)
    assert found is None if said is None else found.startswith(f"{said}: ")


def dequantize(weight):
    """Return the expanded weight that the kernel should give, by the reference."""
    w = tiles.dequantize(weight.tiles, weight.N, weight.K, weight.operand)
    return w * nvfp4.expanded_factor(weight.operand)


def one_launch_wrong(x, a, how):
    """Let one variant of the small kernel divide its columns wrongly."""
    s = adapter.shrink(x, a, how)
    return s if how.variant != adapter.VARIANTS[-1] else s * 2


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_the_kernels_beside_a_variant_are_proven_too(operand, monkeypatch):
    given = proof.make(torch.device("cpu"), operand)
    monkeypatch.setattr(gemm, "dequantize", dequantize)
    assert proof.examine_beside(given) is None
    monkeypatch.setattr(proof, "shrink", one_launch_wrong)
    assert proof.examine_beside(given).startswith(f"adapter's first product, {adapter.VARIANTS[-1]}: ")
    monkeypatch.setattr(gemm, "dequantize", lambda weight: dequantize(weight) * 0.5)
    assert proof.examine_beside(given).startswith("expanded weight: ")


@pytest.mark.parametrize("operand", tiles.ORDERS, ids=str)
def test_a_problem_is_the_same_while_a_model_loads_and_under_autocast(operand):
    """Check the default dtype that vLLM's loader sets, and a forward pass that asks first."""
    expected, before = proof.make(torch.device("cpu"), operand), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = proof.make(torch.device("cpu"), operand)
            assert (found.x @ found.x).dtype == torch.bfloat16, "autocast is on"
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found.alone, expected.alone) and torch.equal(found.adapted, expected.adapted)
    assert found.weight.row_scale.dtype == torch.float32


def test_every_code_is_asked_under_every_scale():
    given = proof.make(torch.device("cpu"), torch.bfloat16)
    dense = tiles.dequantize(given.weight.tiles, proof.ROWS, proof.COLUMNS).float()
    assert torch.equal(given.alone.float().roll(-3, 0), dense.t())  # each token selects one column
    blocks = dense.reshape(-1, 16).sort(dim=1).values.unique(dim=0)
    assert len(blocks) == 127  # one block of all codes for each scale; those under -s equal those under s
    assert (given.adapted.float() - given.alone.float()).abs().max() > 50
    linear_tiles._check_adapter(given.x, given.weight, given.adapter)
    assert given.adapter.spans.tolist() == [[0, 32]] * 3, "each block of 64 rows has all 32 columns of s"
    for part in (given.adapter.a, given.adapter.b):
        assert bool((part < 0).any()) and bool((part > 0).any())


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Fake a GPU whose second variant is wrong, cache in ``tmp_path``, and return what was examined."""
    examined = []
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gemm, "load", lambda *_: None)
    monkeypatch.setattr(gemm, "compile_all", lambda *_: None)
    monkeypatch.setattr(gemm, "machine_code", lambda configuration, operand: repr((configuration, operand)).encode())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(proof, "problem", functools.cache(lambda device, operand: (device + 0, operand.itemsize)))
    monkeypatch.setattr(rule, "machine_of", lambda device: rule.rule().machine)

    def examine(configuration, given):
        examined.append(configuration)
        return "weight: 7 of 9 outputs differ" if configuration == VARIANTS[1] else None

    monkeypatch.setattr(proof, "examine", examine)
    monkeypatch.setattr(proof, "load_shrink", lambda *_: None)
    monkeypatch.setattr(proof, "shrink_code", lambda variant, operand: repr((variant, operand)).encode())
    monkeypatch.setattr(gemm, "dequantize_code", lambda operand: repr(operand).encode())
    monkeypatch.setattr(proof, "examine_beside", lambda given: None)
    forget()
    yield examined
    forget()


def forget():
    """Clear the in-process caches, as a new process would start."""
    for function in (proof.verdict, proof.verdict_beside, linear_tiles.machine, linear_tiles.prepare):
        function.cache_clear()


def test_a_verdict_is_found_once_for_each_code_and_gpu(machine, monkeypatch):
    gpu = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match=r"1 of 3 kernels do not load or compute wrong numbers .*: weight: 7 of 9"):
        assert proof.usable(VARIANTS, gpu, torch.bfloat16) == [VARIANTS[0], VARIANTS[2]]
    assert machine == VARIANTS
    proof.verdict.cache_clear()  # another process
    with pytest.warns(UserWarning, match="weight: 7 of 9"):
        assert proof.usable(VARIANTS, gpu, torch.bfloat16) == [VARIANTS[0], VARIANTS[2]]
    assert machine == VARIANTS, "read from the cache"
    proof.verdict.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    with pytest.warns(UserWarning):
        proof.usable(VARIANTS, gpu, torch.bfloat16)
    assert machine == VARIANTS * 2
    with pytest.warns(UserWarning):
        proof.usable(VARIANTS, gpu, torch.float16)
    assert machine == VARIANTS * 3


def test_a_proof_that_asks_for_something_else_is_not_content_with_a_verdict_of_before(machine, monkeypatch, tmp_path):
    gpu, changed = torch.device("cuda", 0), tmp_path / "proof.py"
    changed.write_bytes(Path(proof.__file__).read_bytes() + b"\n")
    for file in (proof.__file__, str(changed), proof.__file__):
        monkeypatch.setattr(proof, "__file__", file)
        proof.usable(VARIANTS[:1], gpu, torch.bfloat16)
        forget()
    assert machine == VARIANTS[:1] * 2


def test_a_damaged_verdict_is_found_anew(machine):
    gpu = torch.device("cuda", 0)
    proof.usable(VARIANTS[:1], gpu, torch.bfloat16)
    (file,) = compiler.cache_folder().glob("*.verdict")
    file.write_bytes(file.read_bytes().replace(proof.PASSED, b"flunked"))
    assert nvrtc.kept(file) is None
    proof.verdict.cache_clear()
    with pytest.warns(UserWarning, match="is damaged and is made again"):
        assert proof.usable(VARIANTS[:1], gpu, torch.bfloat16) == VARIANTS[:1]
    assert machine == VARIANTS[:1] * 2 and nvrtc.kept(file) == proof.PASSED


def test_the_rule_does_without_a_refused_variant(machine):
    chosen = rule.choose(3584, 3584, 8)
    bad = gemm.replace(chosen.configuration, splits=0)
    there = gemm.replace(rule.rule().machine, refused=frozenset([bad]))
    other = rule.choose(3584, 3584, 8, machine=there)
    assert gemm.replace(other.configuration, splits=0) != bad and other.microseconds >= chosen.microseconds


def test_a_layer_for_which_no_variant_is_left_is_refused_and_marlin_takes_it(machine, monkeypatch):
    monkeypatch.setattr(linear_tiles, "_warn_untuned", lambda *_: None)
    gpu = torch.device("cuda", 0)
    with pytest.warns(UserWarning):
        linear_tiles.prepare(192, 512, gpu, torch.bfloat16)
    assert linear_tiles.machine(0, torch.bfloat16).refused == {VARIANTS[1]}
    wrong_in_all_that_fit = {c for c in rule.rule().variants if rule.fits(c, 640, 8)}
    assert 0 < len(wrong_in_all_that_fit) < len(rule.rule().variants)
    monkeypatch.setattr(proof, "examine", lambda c, _: "weight: all differ" if c in wrong_in_all_that_fit else None)
    with pytest.warns(UserWarning), pytest.raises(compiler.CompileError, match="fits 640 columns and 8 tokens"):
        linear_tiles.prepare(192, 640, gpu, torch.float16)


def test_nothing_that_was_allocated_to_ask_stays_behind(machine, monkeypatch):
    """Check that a proof's tensors and counters are freed.

    While a model loads they lie in memory that vLLM's sleep mode frees.
    """
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(linear_tiles, "_warn_untuned", lambda *_: None)
    made = []
    monkeypatch.setattr(counters, "_of_stream", functools.cache(lambda device, stream: made.append("counters")))
    monkeypatch.setattr(proof, "problem", functools.cache(lambda device, operand: made.append("problem")))
    # A proof's launches make counters.
    monkeypatch.setattr(proof, "examine", lambda configuration, given: counters._of_stream(0, 0))
    linear_tiles.prepare(192, 512, gpu, torch.bfloat16)
    assert made == ["problem", "counters", "problem"]
    assert counters._of_stream.cache_info().currsize == proof.problem.cache_info().currsize == 0


def test_a_wrong_kernel_beside_the_product_leaves_none_and_its_verdict_can_be_asked_again(machine, monkeypatch):
    monkeypatch.setattr(linear_tiles, "_warn_untuned", lambda *_: None)
    gpu, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(proof, "examine_beside", lambda given: asked.append(1) or "expanded weight: 7 of 9 differ")
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="weight: 7 of 9"),
            pytest.raises(
                compiler.CompileError, match=r"beside the product .*: expanded weight: 7 of 9.*delete "
            ) as said,
        ):
            linear_tiles.prepare(192, 512, gpu, torch.bfloat16)
        forget()
    assert len(asked) == 1, "its verdict was not kept"
    (file,) = [f for f in compiler.cache_folder().glob("*.verdict") if f.name in str(said.value)]
    file.unlink()
    monkeypatch.setattr(proof, "examine_beside", lambda given: None)
    with pytest.warns(UserWarning):
        linear_tiles.prepare(192, 512, gpu, torch.bfloat16)


def test_one_variant_that_does_not_load_leaves_the_others_and_none_is_one_reason_for_every_layer(machine, monkeypatch):
    """Check that one failing variant leaves the others, and that all failing gives one reason for every layer.

    Marlin then stands in with one warning, since layouts.py warns once per text.
    """
    gpu, loads, failing = torch.device("cuda", 0), [], {VARIANTS[0]}

    def load(configuration, *_):
        loads.append(configuration)
        if configuration in failing:
            raise compiler.CompileError("loading nvfp4_gemm: CUDA error 209 (no kernel image)")

    monkeypatch.setattr(gemm, "load", load)
    with pytest.warns(UserWarning, match=r"2 of 3 kernels do not load or compute wrong numbers .*209"):
        assert proof.usable(VARIANTS, gpu, torch.bfloat16) == VARIANTS[2:]
    assert machine == VARIANTS[1:] and len(list(compiler.cache_folder().glob("*.verdict"))) == 2
    forget()
    loads.clear()
    failing.update(rule.rule().variants)
    reasons = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the caller warns, not this function
        for N, K in ((192, 512), (192, 1024), (320, 512)):
            with pytest.raises(
                compiler.CompileError, match=r"none of \d+ kernels can be used .* CUDA error 209"
            ) as error:
                linear_tiles.prepare(N, K, gpu, torch.bfloat16)
            reasons.add(str(error.value))
    assert len(reasons) == 1 and len(loads) == len(rule.rule().variants), "tried once, not once a layer"


def test_a_kernel_beside_the_product_that_does_not_load_is_tried_once_and_not_kept_as_a_verdict(machine, monkeypatch):
    gpu, loads = torch.device("cuda", 0), []

    def load(*_):
        loads.append(1)
        raise compiler.CompileError("loading adapter_shrink: CUDA error 209 (no kernel image)")

    monkeypatch.setattr(proof, "load_shrink", load)
    monkeypatch.setattr(proof, "examine", lambda configuration, given: None)
    kept = len(rule.rule().variants)
    for N, K in ((192, 512), (192, 1024), (320, 512)):
        with pytest.raises(compiler.CompileError, match=r"beside the product cannot be used .* CUDA error 209"):
            linear_tiles.prepare(N, K, gpu, torch.bfloat16)
    assert len(loads) == 1 and len(list(compiler.cache_folder().glob("*.verdict"))) == kept


def test_without_a_cache_each_kernel_is_compiled_once(monkeypatch, tmp_path):
    """Check that loading and proving, which both need the machine code, share one compilation."""
    compiled = []

    class Kernel:
        def __init__(self, *_, **__): ...

        def clusters_at_once(self):
            return 1

    cached = (
        *(gemm._kernel, gemm._dequantize_kernel, gemm.machine_code, gemm.dequantize_code),
        *(adapter._kernel, adapter.load_shrink, adapter.shrink_code),
    )
    folder = tmp_path / "of_others"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("QERL_CACHE", str(folder))
    for module in (gemm, adapter):
        monkeypatch.setattr(module, "compile_source", lambda *job: compiled.append(job) or repr(job).encode())
        monkeypatch.setattr(module, "Kernel", Kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(rule, "machine_of", lambda device: rule.rule().machine)
    monkeypatch.setattr(proof, "problem", functools.cache(lambda device, operand: None))
    monkeypatch.setattr(proof, "examine", lambda *_: None)
    monkeypatch.setattr(proof, "examine_beside", lambda given: None)
    monkeypatch.setattr(linear_tiles, "_warn_untuned", lambda *_: None)
    for function in cached:
        function.cache_clear()
    forget()
    try:
        with pytest.warns(UserWarning, match="is not used as a cache"):
            linear_tiles.prepare(192, 512, torch.device("cuda", 0), torch.bfloat16)
    finally:
        forget()
        for function in cached:
            function.cache_clear()
    assert len(compiled) == len(set(compiled)) == len(rule.rule().variants) + len(adapter.VARIANTS) + 1
