"""Test that an engine samples as a recipe says, the same every time, from the policy that the trainer has."""

import itertools
import re
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from qerl_recipes.model import norms
from qerl_recipes.rollout import engine as engine_module
from qerl_recipes.rollout import sampling
from qerl_recipes.rollout.sampling import Request
from qerl_recipes.tasks import running_sum
from qerl_vllm_plugin.compat import drafts
from qerl_vllm_plugin.compat.scheduler import BlockRoom, scheduler_here

TOKENIZER = running_sum.tokenizer()
PROMPTS = [TOKENIZER(p["prompt"])["input_ids"] for p in running_sum.held_out(4) for _ in range(4)]


def test_an_engine_warms_up_what_its_rollouts_sample_with(start_engine, monkeypatch):
    seen = []

    def started(**options):
        seen.append(SamplingParams.for_sampler_warmup())
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "LLM", started)
    for keys in ({"top_k": 20}, {"generation_kwargs": {"min_tokens": 9, "stop": ["7"]}}):
        with pytest.raises(KeyboardInterrupt):
            start_engine(16, temperature=0.5, **keys)
    assert [(each.temperature, each.top_k, each.min_p, each.logprobs) for each in seen] == [
        (0.5, 20, 0.0, 0),
        (0.5, 0, 0.0, 0),
    ]
    assert [each.min_tokens for each in seen] == [0, 9]


@torch.no_grad()
def mismatch(policy, rollout, temperature=1.0):
    """Return the mean |log p| difference between the engine's report and the trainer's model."""
    differences = []
    for prompt, completion, logprobs, _ in zip(*rollout[:3], rollout[1], strict=True):
        logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        ours = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        differences.append((ours - torch.tensor([step[0] for step in logprobs])).abs())
    return float(torch.cat(differences).mean())


def kept(logits, *, temperature, min_p, top_k, top_p):
    """Return log-probabilities (T, V) of the distribution that is sampled from, with -inf for tokens cut off."""
    logits = logits / temperature
    probabilities = logits.softmax(-1)
    logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    ordered, places = logits.softmax(-1).sort(descending=True)
    enough = torch.zeros_like(ordered, dtype=torch.bool).scatter(1, places, ordered.cumsum(-1) - ordered >= top_p)
    return logits.masked_fill(enough, -torch.inf).log_softmax(-1)


@torch.no_grad()
def test_the_engine_samples_as_the_keys_say_and_reports_that_distribution(start_engine, policy):
    keys = {"temperature": 0.6, "min_p": 0.02, "top_k": 8, "top_p": 0.9}
    without = {"temperature": 1.0, "min_p": 0.0, "top_k": 64, "top_p": 1.0}
    engine = start_engine(16, **keys)
    try:
        engine.begin(0, None)
        rollout = engine.generate(PROMPTS, None, 4)
    finally:
        engine.close()
    differences = dict.fromkeys(("all", *keys), 0.0)
    for prompt, completion, logprobs, _ in zip(*rollout[:3], rollout[1], strict=True):
        logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
        for name in differences:
            used = keys if name == "all" else {**keys, name: without[name]}
            ours = kept(logits, **used).gather(1, torch.tensor(completion)[:, None])[:, 0]
            largest = float((ours - torch.tensor([step[0] for step in logprobs])).abs().max())
            differences[name] = max(differences[name], largest)
    assert differences.pop("all") < 1e-3
    assert min(differences.values()) > 0.02, differences  # each of the four changes something


def test_more_prompts_than_the_engine_computes_at_once_are_answered(start_engine):
    """Check that no prompt is computed in parts.

    That would set its seeded generator back, which torch's generator on a CPU cannot do.
    """
    engine = start_engine(128)
    prompts = [PROMPTS[i // 4 % 4][:1] * 47 for i in range(128)]  # 6016 tokens, where vLLM takes 4096 at once
    try:
        engine.begin(0, None)
        assert [len(ids) > 0 for ids in engine.generate(prompts, None, 4)[1]] == [True] * 128
    finally:
        engine.close()


def test_a_stop_string_ends_a_completion_and_without_one_there_is_no_text(start_engine, monkeypatch):
    """Check that no text is made in vain.

    Text costs vLLM more than all its other CPU work on a token, and the trainer does not read it.
    """

    def generate(**settings):
        engine, outputs = start_engine(16, **settings), []
        step = engine.llm.llm_engine.step
        monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: (new := step(), outputs.extend(new))[0])
        try:
            engine.begin(0, None)
            return engine.generate(PROMPTS, None, 4)[1], [output.outputs[0].text for output in outputs]
        finally:
            engine.close()

    free, texts = generate()
    assert not texts  # vLLM's own step, which would make text, is not taken
    word = Counter("".join(TOKENIZER.batch_decode(free, skip_special_tokens=True))).most_common(1)[0][0]
    stopped, texts = generate(generation_kwargs={"stop": [word]})
    assert any(texts) and word not in "".join(texts)
    assert stopped != free
    for ids, longer in zip(stopped, free, strict=True):
        assert ids == longer[: len(ids)]
        assert word not in TOKENIZER.decode(ids[:-1], skip_special_tokens=True)
        assert len(ids) == len(longer) or word in TOKENIZER.decode(ids, skip_special_tokens=True)


def test_a_logit_bias_from_json_reaches_the_engine(start_engine):
    """Check that keys become tokens: JSON keys are strings, and vLLM compares tokens."""
    engine = start_engine(16, generation_kwargs={"logit_bias": {"9": 100.0}})
    try:
        engine.begin(0, None)
        assert {token for ids in engine.generate(PROMPTS, None, 4)[1] for token in ids} == {9}
    finally:
        engine.close()


def test_the_engine_has_the_size_that_the_recipe_gives_it(engine):
    found = engine.llm.llm_engine.vllm_config
    assert found.scheduler_config.max_num_seqs == 16  # per_device_train_batch_size
    assert found.model_config.max_model_len == 64
    assert found.cache_config.gpu_memory_utilization == engine._training.vllm_gpu_memory_utilization == 0.3


def test_processes_that_share_an_engine_have_its_seed(engine, make_nvfp4, monkeypatch):
    """Check that the processes of tensor parallelism have one seed, because they must sample alike."""
    monkeypatch.setattr(engine, "_tensor_parallel", 2)

    def seed(process):
        monkeypatch.setattr(engine, "_accelerator", SimpleNamespace(process_index=process))
        return engine._options(str(make_nvfp4("qwen2")), 4, torch.float32)["seed"]

    assert [seed(process) for process in range(4)] == [0, 0, 1, 1]


def test_given_tokens_are_scored_with_the_adapter_that_vllm_holds_in_a_slot(engine, monkeypatch):
    """Check that scoring names the adapter, as the arms bf16 and nf4 need.

    For a request that does not name the adapter, vLLM computes the base alone.
    """
    asked, generate = [], engine.llm.generate

    def note(*arguments, lora_request, **options):
        asked.append(lora_request)
        return generate(*arguments, **options)

    engine.begin(0, None)
    monkeypatch.setattr(engine.llm, "generate", note)
    monkeypatch.setattr(type(engine.policy), "request", "the adapter")
    assert len(engine.score(PROMPTS[:2], [[5, 6], [7]])[0]) == 2
    assert asked == ["the adapter"]


def test_the_trainer_schedules_as_quickly_as_it_can(engine):
    assert type(scheduler_here(engine.llm).kv_cache_manager) is BlockRoom


def test_promise_08_a_rollout_can_be_repeated_exactly(engine):
    engine.begin(3, 0.01)
    first = engine.generate(PROMPTS, None, 4)
    fresh_round = engine.generate(PROMPTS, None, 4)
    engine.begin(4, 0.01)
    other = engine.generate(PROMPTS, None, 4)
    engine.begin(3, 0.01)
    assert engine.generate(PROMPTS, None, 4) == first
    assert first[1] != fresh_round[1] != other[1]
    assert len({tuple(ids) for ids in first[1][:4]}) > 1  # samples of one prompt differ


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def drafting(start_engine):
    engine = start_engine(16, vllm_speculative_config=NGRAM)
    yield engine
    engine.close()


def test_drafts_save_steps_and_leave_the_log_probabilities_of_the_policy(drafting, policy, monkeypatch):
    taken = []

    def step(llm_engine, completions):
        before = {name: len(completion.ids) for name, completion in completions.items()}
        ended = sampling_step(llm_engine, completions)
        taken.extend(len(completion.ids) - before[name] for name, completion in completions.items())
        return ended

    sampling_step = sampling.step
    monkeypatch.setattr(sampling, "step", step)
    for temperature in (1.0, 0.5):
        monkeypatch.setitem(drafting._sampling, "temperature", temperature)
        drafting.begin(0, None)
        rollout = drafting.generate(PROMPTS, None, 4)
        assert mismatch(policy, rollout, temperature) < 1e-4
    assert max(taken) > 1, "a draft was accepted"
    import numba

    assert numba.threading_layer() == "workqueue", "OpenMP's threads would slow the trainer down"


def test_drafts_are_checked_at_their_temperature_in_every_arm(start_engine, monkeypatch):
    def started(**options):
        assert options["speculative_config"] == NGRAM
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "LLM", started)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", None)
    with pytest.raises(KeyboardInterrupt):
        start_engine(16, quantization="bf16", vllm_speculative_config=NGRAM)
    assert rejection_sampler.expand_batch_to_tokens is drafts.expand


def test_promise_08_a_rollout_with_drafts_can_be_repeated_exactly(drafting):
    first, again = (drafting.begin(2, 0.01) and drafting.generate(PROMPTS, None, 4) for _ in range(2))
    assert first == again
    drafting.begin(2, 0.01)
    alone = drafting.generate(PROMPTS[:4], None, 4)
    assert alone[1] == first[1][:4], "what else is computed changes no draw"


@torch.no_grad()
def test_drafts_keep_the_distribution_of_what_is_sampled(drafting, policy):
    """Compare counts of the first two tokens with the policy's own probabilities; the second one is checked a draft."""
    prompt, many = PROMPTS[0], 2000
    drafting.begin(0, None)
    requests = [Request(prompt, seed, 2) for seed in range(many)]
    pairs = Counter(tuple(ids) for ids, _ in drafting._compute(requests)[0] if len(ids) == 2)
    first = policy(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    size = len(first)
    prompts = torch.tensor([[*prompt, token] for token in range(size)])
    joint = first[:, None] * policy(prompts).logits[:, -1].softmax(-1)
    seen = torch.zeros(size, size)
    for pair, count in pairs.items():
        seen[pair] = count
    ended = TOKENIZER.eos_token_id
    joint[ended], seen[ended] = 0, 0
    expected = joint / joint.sum() * seen.sum()
    often = expected > 5
    score = ((seen - expected)[often] ** 2 / expected[often]).sum()
    freedom = int(often.sum())
    assert freedom > 30
    assert abs(score - freedom) < 4 * (2 * freedom) ** 0.5


def test_rollouts_evaluations_and_processes_draw_apart(engine, monkeypatch):
    def begun(*rollout):
        engine.begin(*rollout, None) if rollout else engine.begin_evaluation()
        return engine.generate(PROMPTS, None, 4)[1]

    drawn = [begun(0), begun(1), begun()]
    monkeypatch.setattr(engine, "_accelerator", SimpleNamespace(process_index=1))
    drawn.append(begun(0))  # the same prompts, asked by the second process
    assert all(one != other for one, other in itertools.combinations(drawn, 2))


def test_rollout_and_trainer_agree_only_with_the_same_adapter_and_noise(engine, policy, randomize):
    engine.begin(0, None)
    assert mismatch(policy, engine.generate(PROMPTS, None, 4)) < 1e-3
    engine.begin(1, 0.2)
    noisy = engine.generate(PROMPTS, None, 4)
    without_noise = mismatch(policy, noisy)
    norms.set_noise(policy, 0.2, 5, 1)
    with_noise = mismatch(policy, noisy)
    norms.clear_noise(policy)
    assert with_noise < 1e-3
    assert without_noise > 100 * with_noise
    randomize(policy, 1)
    engine.begin_evaluation()
    assert mismatch(policy, engine.generate(PROMPTS, None, 4)) < 1e-3
    randomize(policy, 2)
    assert mismatch(policy, engine.generate(PROMPTS, None, 4)) > 0.2  # the adapter is not swapped yet
    engine.sync_weights()
    assert mismatch(policy, engine.generate(PROMPTS, None, 4)) < 1e-3


def test_the_engines_noise_has_the_seed_and_the_targets_of_the_recipe(engine, policy, monkeypatch):
    monkeypatch.setattr(engine._training, "noise_seed", 9)
    monkeypatch.setattr(engine._training, "noise_targets", ["input_layernorm"])
    assert engine.begin(1, 0.2) == 2  # one norm in each layer
    noisy = engine.generate(PROMPTS, None, 4)
    assert norms.set_noise(policy, 0.2, 9, 1, ["input_layernorm"]) == 2
    with_noise = mismatch(policy, noisy)
    norms.clear_noise(policy)
    assert with_noise < 1e-3


def test_promise_07_the_trainers_tensors_are_never_modified(engine, policy):
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    for rollout in range(3):
        engine.begin(rollout, 0.1)
        engine.generate(PROMPTS[:4], None, 4)
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())


def test_what_the_trainer_draws_does_not_depend_on_the_engine(engine):
    """Check that the global generator is untouched.

    vLLM draws for every request before it looks at the request's own seed.
    """
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    engine.begin(0, 0.1)
    engine.generate(PROMPTS, None, 4)
    assert torch.equal(torch.rand(4), expected)


def test_evaluation_is_without_noise_and_the_same_every_time(engine):
    engine.begin(1, 0.2)
    engine.begin_evaluation()
    assert engine.policy.state().sigma == 0
    first = engine.generate(PROMPTS, None, 4)
    engine.begin(2, 0.2)
    engine.begin_evaluation()
    assert engine.generate(PROMPTS, None, 4) == first


def test_tokens_are_counted_from_the_start_of_a_rollout(engine):
    engine.begin(0, None)
    assert engine.tokens == engine.seconds == 0
    began = time.perf_counter()
    first = engine.generate(PROMPTS, None, 4)
    seconds = engine.seconds
    second = engine.generate(PROMPTS[:4], None, 4)
    assert engine.tokens == sum(len(ids) for ids in first[1] + second[1])
    assert 0 < seconds < engine.seconds < time.perf_counter() - began


def test_a_regular_expression_of_the_recipe_binds_every_completion(engine, monkeypatch):
    monkeypatch.setattr(engine._training, "vllm_structured_outputs_regex", "[0-4]{3,5}")
    monkeypatch.setattr(engine, "_sampling", engine._sampling_options())
    engine.begin(0, None)
    texts = TOKENIZER.batch_decode(engine.generate(PROMPTS, None, 4)[1], skip_special_tokens=True)
    assert all(re.fullmatch("[0-4]{3,5}", text.replace(" ", "")) for text in texts), texts


def test_images_are_refused(engine):
    with pytest.raises(ValueError, match="reads text only"):
        engine.generate(PROMPTS, [None] * len(PROMPTS), 4)
