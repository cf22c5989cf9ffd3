"""Test versions, norms and noise of one worker without an engine, and a change that some rank refuses."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from qerl_vllm_plugin import noise
from qerl_vllm_plugin.adapter.check import STRENGTH, AdapterError, Checker, Target
from qerl_vllm_plugin.compat import worker as vllm_worker
from qerl_vllm_plugin.wire.cuda_ipc import CudaIPCError
from qerl_vllm_plugin.worker.change import ANOTHER_RANK, Change, on_all_ranks
from qerl_vllm_plugin.worker.change_log import ChangeLog
from qerl_vllm_plugin.worker.policy import WorkerPolicy, digest_of, most_bytes, prepare_noise, prepare_swap

NAMES = ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight", "model.norm.weight")
TARGETS = list(noise.DEFAULT_TARGETS)
TRAINED = {NAMES[0]: torch.linspace(0.5, 1.5, 8), NAMES[2]: torch.linspace(-1, 1, 8)}


@pytest.fixture
def policy():
    """Return a worker's policy with the norms of its stage and one norm of another stage. It has no carrier for an
    adapter."""
    generator = torch.Generator().manual_seed(0)
    norms = {name: torch.randn(8, generator=generator) for name in NAMES}
    layers = {name: SimpleNamespace(weight=torch.nn.Parameter(norm.clone())) for name, norm in norms.items()}
    sizes = dict.fromkeys(NAMES, 8) | {"model.layers.9.input_layernorm.weight": 8}
    return WorkerPolicy(None, layers, None, norms, dict(norms), {}, sizes, Checker({}, 0), changes=ChangeLog())


@pytest.fixture
def ranks(monkeypatch):
    """Play another rank, which refuses at the first or second question of a change, as ``ranks.refuse`` says."""
    asked = SimpleNamespace(refuse=None, count=0, stopped=[])

    def highest(here):
        asked.count += 1
        return 2 if asked.count == asked.refuse else here

    monkeypatch.setattr(vllm_worker, "highest", highest)
    monkeypatch.setattr(vllm_worker, "weights_are_away", lambda: False)
    # only this worker may be asked
    monkeypatch.setattr(vllm_worker, "may_sleep", lambda worker: {"this worker": False}[worker])
    monkeypatch.setattr(
        vllm_worker, "refuse_to_run", lambda worker, reason: asked.stopped.append((worker, str(reason())))
    )
    return asked


def served(policy):
    return {name: layer.weight.data.clone() for name, layer in policy.layers.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def swap(policy, version=None, digest="", norms=None, tensors=None, config=None):
    return prepare_swap(policy, tensors, config, norms, version, digest).commit()


def test_versions_go_up_and_the_same_adapter_again_is_no_change(policy):
    assert swap(policy) == {"version": 1, "modules": 0}
    assert swap(policy, 7, "a")["version"] == policy.version == 7
    before = served(policy)
    assert swap(policy, 7, "a", TRAINED) == {"version": 7, "unchanged": True}
    for version, digest in ((7, "b"), (7, ""), (6, "a"), (0, "")):
        with pytest.raises(AdapterError, match=f"version {version} is not newer than 7, which is served"):
            swap(policy, version, digest, TRAINED)
    assert same(served(policy), before) and (policy.version, policy.digest) == (7, "a")
    assert swap(policy)["version"] == 8 and policy.digest == ""
    assert swap(policy, 8) == {"version": 8, "unchanged": True}  # the same swap to the base alone
    with pytest.raises(AdapterError, match="version 8 is not newer"):
        swap(policy, 8, norms=TRAINED)  # two norms without a digest do not count as the same


def test_an_adapter_without_a_place_for_it_is_refused(policy):
    with pytest.raises(AdapterError, match="this engine has no room for an adapter"):
        swap(policy, tensors={}, config={})


class Carrier:
    """A fake carrier that records what it is asked for."""

    max_rank, dtype, strength = 4, torch.bfloat16, 1.0

    def __init__(self):
        self.asked = []

    def prepare(self):
        self.asked.append("prepare")

    def stage(self, checked):
        self.asked.append("stage")
        return SimpleNamespace(checked=checked, strength=self.strength)

    def commit(self, staged):
        self.asked.append(staged.checked)


LINEARS = {f"model.layers.{i}.mlp.up_proj": Target("up_proj", 0, 8, 16) for i in (0, 1)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["up_proj"]}


def adapter():
    return {
        f"base_model.model.{name}.lora_{half}.weight": torch.ones(shape)
        for name in LINEARS
        for half, shape in (("A", (4, 8)), ("B", (16, 4)))
    }


def test_promise_04_an_adapter_is_staged_before_its_commit(policy):
    policy.carrier, policy.targets, policy.checker = Carrier(), LINEARS, Checker(LINEARS, 4)
    tensors = adapter()
    change = prepare_swap(policy, tensors, CONFIG, None, None, "")
    assert policy.carrier.asked == ["prepare", "stage"] and policy.version == 0
    assert change.commit() == {"version": 1, "modules": 2} and policy.carrier.asked[2].pairs.keys() == LINEARS.keys()
    policy.carrier.asked.clear()
    swap(policy)
    assert policy.carrier.asked == ["prepare", "stage", None], "no adapter is staged as such"
    policy.carrier.asked.clear()
    with pytest.raises(AdapterError, match="config is list; it must be an object"):
        swap(policy, tensors=tensors, config=[])
    tensors.popitem()
    with pytest.raises(AdapterError, match="is missing"):
        swap(policy, tensors=tensors, config=CONFIG)
    assert policy.carrier.asked == [] and policy.version == 2


def test_the_largest_adapter_fits_most_bytes(policy):
    norms = {name: torch.ones(size) for name, size in policy.sizes.items()}
    assert len(save(norms)) <= most_bytes(policy) < len(save(norms)) + (2 << 20)
    policy.carrier, policy.targets = Carrier(), LINEARS
    whole = len(save({**adapter(), **norms}))
    assert whole <= most_bytes(policy) < whole + (2 << 20)
    policy.sizes = dict.fromkeys(NAMES, 1 << 20)
    policy.carrier.max_rank = 1 << 16
    numbers = 3 * (1 << 20) + 2 * (1 << 16) * (8 + 16)
    assert 4 * numbers + (1 << 16) < most_bytes(policy) < 4 * numbers + (2 << 20)


def test_promise_04_trained_norms_are_set_whole_or_not_at_all(policy):
    loaded = served(policy)
    for name, bad, message in (
        ("model.layers.1.input_layernorm.weight", torch.ones(8), "is no norm of this model"),
        (NAMES[1], torch.ones(9), r"has shape \(9,\), not \(8,\)"),
        (NAMES[1], torch.ones(1, 8), r"has shape \(1, 8\)"),
        (NAMES[1], torch.tensor([1.0] * 7 + [torch.nan]), "holds NaN or infinite"),
        (NAMES[1], torch.tensor([1.0] * 7 + [-torch.inf]), "holds NaN or infinite"),
        (NAMES[1], torch.full((8,), 1e300, dtype=torch.float64), "is torch.float64; use float32, bfloat16 or float16"),
        (NAMES[1], torch.ones(8, dtype=torch.int32), r"is torch\.int32"),
        (NAMES[1], torch.ones(8, dtype=torch.bool), r"is torch\.bool"),
        ("model.layers.9.input_layernorm.weight", torch.ones(7), r"has shape \(7,\)"),
    ):
        with pytest.raises(AdapterError, match=message):
            swap(policy, norms={**TRAINED, name: bad})
        assert same(served(policy), loaded) and policy.version == 0
    given = {name: norm.bfloat16() for name, norm in TRAINED.items()}
    elsewhere = {"model.layers.9.input_layernorm.weight": torch.ones(8)}  # a norm of another stage
    swap(policy, norms={**given, **elsewhere})
    assert same(served(policy), {**loaded, **{name: norm.float() for name, norm in given.items()}})
    swap(policy)
    assert same(served(policy), loaded), "a policy without trained norms has those of the checkpoint"


def test_trained_norms_are_finite_in_the_engines_dtype(policy):
    policy.checkpoint_norms = {name: norm.half() for name, norm in policy.checkpoint_norms.items()}
    with pytest.raises(AdapterError, match=r"or values too large for torch\.float16"):
        swap(policy, norms={NAMES[1]: torch.full((8,), 1e5)})
    swap(policy, norms={NAMES[1]: torch.full((8,), 6e4)})


def test_what_may_lead_to_activations_too_large_is_doubted(policy):
    policy.carrier, policy.targets, policy.checker = Carrier(), LINEARS, Checker(LINEARS, 4)

    def is_doubted(norms=None, tensors=None):
        return prepare_swap(policy, tensors, CONFIG, norms, None, "").is_doubtful

    assert not is_doubted() and not is_doubted(TRAINED) and not is_doubted(tensors=adapter())
    assert is_doubted({NAMES[1]: torch.tensor([1.0] * 7 + [-101.0])}) and not is_doubted(
        {NAMES[1]: torch.full((8,), 99.0)}
    )
    policy.carrier.strength = 1.01 * STRENGTH
    assert is_doubted(tensors=adapter())
    policy.carrier.strength, policy.carrier.dtype = 0.0, torch.float16
    assert is_doubted(tensors=adapter()) and not is_doubted()  # without an adapter there is nothing to doubt
    assert (
        prepare_noise(policy, 101, 5, 1, TARGETS).is_doubtful
        and not prepare_noise(policy, 9, 5, 1, TARGETS).is_doubtful
    )


def test_promise_03_noise_is_set_and_cleared_to_the_bit(policy):
    loaded = served(policy)
    swap(policy, norms=TRAINED)
    trained = {**loaded, **TRAINED}

    def noisy(base, sigma, rollout, names):
        drawn = {name: noise.draw(5, rollout, name, 8) for name in names}
        return {name: norm + sigma * drawn[name] if name in drawn else norm for name, norm in base.items()}

    for sigma, rollout in ((0.5, 1), (0.25, 2)):  # the second noise must not add to the first
        answer = prepare_noise(policy, sigma, 5, rollout, TARGETS).commit()
        # counts the whole model's norms, of which one is on another stage
        assert answer == {"noisy_norms": 3, "touched": 3, "swallowed": 0.0}
        assert same(served(policy), noisy(trained, sigma, rollout, NAMES[:2]))
    swap(policy)
    assert same(served(policy), noisy(loaded, 0.25, 2, NAMES[:2])), "the noise stays under the next policy"
    assert prepare_noise(policy, 0.25, 5, 2, ["norm"]).commit()["noisy_norms"] == 1
    assert same(served(policy), noisy(loaded, 0.25, 2, NAMES[2:]))
    assert prepare_noise(policy, 0, 0, 0, []).commit() == {"noisy_norms": 0, "touched": 0, "swallowed": 0.0}
    assert same(served(policy), loaded) and policy.sigma == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 0, TARGETS), "noise sigma is -1"),
        ((0.1, True, 0, TARGETS), "the noise's seed is True; it must be a whole number"),
        ((0.1, 0, 1.5, TARGETS), r"the noise's rollout is 1\.5"),
        ((0.1, 0, 0, "norm"), "targets are 'norm'; they must be a list"),
        ((0.1, 0, 0, [3]), r"targets are \[3\]"),
        ((0.1, 0, 0, []), "match none"),
        ((0, 0, 0, ["no_norm"]), "match none"),
    ],
)
def test_noise_that_cannot_be_set_is_refused(policy, arguments, message):
    with pytest.raises(ValueError, match=message):
        prepare_noise(policy, *arguments)


def test_norms_in_bf16_say_how_much_of_the_noise_they_have_lost(policy):
    for layer in policy.layers.values():
        layer.weight.data = torch.ones(8, dtype=torch.bfloat16)
    policy.base_norms = {name: torch.ones(8, dtype=torch.bfloat16) for name in NAMES}
    assert prepare_noise(policy, 1e-6, 5, 1, TARGETS).commit()["swallowed"] == 1.0
    assert prepare_noise(policy, 1.0, 5, 1, TARGETS).commit()["swallowed"] < 0.2
    policy.layers[NAMES[0]].weight.data, policy.base_norms[NAMES[0]] = torch.ones(8), torch.ones(8)
    assert 0.5 <= prepare_noise(policy, 1e-6, 5, 1, TARGETS).commit()["swallowed"] < 1, "one of both is in fp32"
    assert prepare_noise(policy, 0, 5, 1, TARGETS).commit() == {"noisy_norms": 0, "touched": 0, "swallowed": 0.0}


def test_a_change_that_all_ranks_take_is_made_and_written_down(policy, ranks):
    answer = on_all_ranks(policy, lambda: prepare_swap(policy, None, None, TRAINED, 3, "a"))
    assert answer.pop("parts").keys() >= {"stage", "agree", "commit"} and answer == {"version": 3, "modules": 0}
    assert policy.changes.count == 1 and same(served(policy), {**served(policy), **TRAINED})
    again = on_all_ranks(policy, lambda: prepare_swap(policy, None, None, TRAINED, 3, "a"))
    assert again["unchanged"] and policy.changes.count == 1, "what is no change is none in the log"


def test_promise_04_what_any_rank_refuses_none_makes(policy, ranks):
    loaded = served(policy)
    ranks.refuse = 1
    assert on_all_ranks(policy, lambda: prepare_swap(policy, None, None, TRAINED, 3, "a")) == {"error": ANOTHER_RANK}
    for error, answer in (
        (AdapterError("no"), {"error": "no"}),
        (CudaIPCError("not here"), {"error": "not here", "unreachable": True}),
        (KeyError("k"), {"error": "KeyError: 'k'"}),
        (ValueError(), {"error": "ValueError: "}),  # the error text is never empty
    ):

        def prepare(error=error):
            raise error

        assert on_all_ranks(policy, prepare) == answer
    assert same(served(policy), loaded) and policy.version == policy.changes.count == 0 and not policy.lost


@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_a_failed_commit_leaves_an_engine_that_serves_nothing(policy, ranks, here):
    policy.worker = "this worker"

    def commit():
        if here:
            raise RuntimeError("a copy failed")
        return {"version": 1}

    ranks.refuse = None if here else 2
    reason = "RuntimeError: a copy failed" if here else ANOTHER_RANK
    answer = on_all_ranks(policy, lambda: Change(commit))
    assert answer == {"error": policy.lost, "lost": True} and answer["error"].endswith(reason)
    assert ranks.stopped == [("this worker", policy.lost)]
    assert policy.changes.is_lost and policy.changes.count == 0
    later = on_all_ranks(policy, lambda: prepare_swap(policy, None, None, None, None, ""))
    assert later == answer and policy.version == 0, "it is never changed again"


def test_a_digest_is_of_bits_in_their_order_however_they_lie():
    table = torch.arange(12.0).view(3, 4)
    found = digest_of([table, table.t()])
    assert found == digest_of([table.clone(), table.t().contiguous()])
    assert found == hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in (table, table.t()))).hexdigest()
    assert found != digest_of([table.t(), table]) and found != digest_of([table, table])
