import itertools
import random
import re
import time
from collections import Counter
from types import SimpleNamespace

import peft
import pytest
import torch
from accelerate import Accelerator
from peft.utils import get_peft_model_state_dict
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from qerl_recipes.model import loading as models
from qerl_recipes.model import norms
from qerl_recipes.recipe.configs import GRPOConfig
from qerl_recipes.rollout import engine as engine_module
from qerl_recipes.rollout import sampling
from qerl_recipes.rollout.arms import ENGINE_ON_CPU
from qerl_recipes.rollout.engine import VLLMRollouts
from qerl_recipes.rollout.interface import Snapshot, Turn
from qerl_recipes.rollout.sampling import Completion, Request
from qerl_recipes.tasks import running_sum
from qerl_vllm_plugin.compat import drafts
from qerl_vllm_plugin.compat.scheduler import BlockRoom, scheduler_here
from qerl_vllm_plugin.worker.kv_cache import KVCacheError

TOKENIZER = running_sum.tokenizer()
PROMPTS = [TOKENIZER(p.prompt)["input_ids"] for p in running_sum.held_out(4) for _ in range(4)]


@pytest.fixture(scope="module")
def policy(make_nvfp4):
    """Return the trainer's side: a model with a random adapter, larger than training would make it."""
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(models.load(make_nvfp4("qwen2"), torch.float32), lora)
    randomize(model, 0)
    return model


def randomize(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture(scope="module")
def start_engine(policy, make_nvfp4, tmp_path_factory, light_engines):
    def snapshot():
        tensors = get_peft_model_state_dict(policy, save_embedding_layers=False)
        return Snapshot(tensors, policy.peft_config["default"].to_dict())

    def start_for(sequences, **settings):
        training = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("run")),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=sequences,
            max_completion_length=16,
            noise_mode="both",
            seed=5,
            **{"num_generations": 4, "vllm_max_model_length": 64, **settings},
        )
        options = {"rank": 4, "dtype": torch.float32, "snapshot": snapshot, "accelerator": Accelerator(cpu=True)}
        return VLLMRollouts(str(make_nvfp4("qwen2")), training, **options)

    return start_for


@pytest.fixture(scope="module")
def engine(start_engine):
    engine = start_engine(16)
    yield engine
    engine.close()


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


@pytest.fixture(scope="module")
def counted(start_engine):
    """Return an engine with blocks of 32 tokens, and the list of the steps that it has scheduled."""
    with pytest.MonkeyPatch.context() as patched:
        blocks = {**ENGINE_ON_CPU, "block_size": 32}
        patched.setattr("qerl_recipes.rollout.engine.engine_on_cpu", lambda base: blocks)
        engine = start_engine(16, generation_kwargs={"min_tokens": 8}, vllm_max_model_length=256)
        scheduler, steps = scheduler_here(engine.llm), []
        schedule = scheduler.schedule
        patched.setattr(scheduler, "schedule", lambda *a, **o: steps.append(schedule(*a, **o)) or steps[-1])
        yield engine, steps
        engine.close()


def take(engine, turns):
    """Return what each of ``turns`` brings; nothing follows."""
    found = {}
    engine.play(turns, lambda ended: found.update((turn.place, Completion(*answer)) for turn, answer in ended) or ())
    return [found[turn.place] for turn in turns]


def test_turns_of_one_batch_keep_the_cache_and_their_tokens(counted):
    engine, steps = counted
    engine.begin(0, None)
    prompts = [[5 + row, *range(3, 33)] for row in range(8)]  # 31 tokens
    with engine.episodes():
        drawn = engine.generate(prompts, None, 4)[1]
        before, tokens = len(steps), engine.tokens
        asked = [Turn([*prompts[row], *drawn[row], 9], row, 1, most) for row, most in ((2, 3), (5, 40))]
        first, again = take(engine, asked), take(engine, asked)
    assert len(first[0].ids) == 3 and 8 <= len(first[1].ids) <= 40
    assert first == again, "the seed is of place and number alone"
    assert engine.tokens == tokens + 2 * sum(len(one.ids) for one in first)
    sampled = sum(len(one.ids) - 1 for one in [*first, *again])
    read = sum(step.total_num_scheduled_tokens for step in steps[before:]) - sampled
    assert read == 2 * sum(len(turn.tokens) - 32 for turn in asked), "a whole block comes from the cache"


@pytest.mark.parametrize("is_emptied", [False, True], ids=["kept", "emptied between turns"])
def test_an_episode_of_six_turns_computes_its_tokens_once(is_emptied, counted):
    """Check that a turn computes only what the turn before it has not: all after its last whole block."""
    engine, steps = counted
    engine.begin(1, None)
    steps.clear()
    history, cached, expected = [5, *range(3, 33)], 0, 0
    with engine.episodes():
        for number in range(6):
            if number == 0:
                (drawn,) = engine.generate([history], None, 1)[1]
            else:
                ((drawn, _),) = take(engine, [Turn(history, 0, number, 9)])
            computed = len(history) + len(drawn) - 1  # not the token that was sampled last
            expected += computed - cached
            cached = computed // 32 * 32
            history = [*history, *drawn, *range(3, 33)]  # what a tool answers
            if is_emptied:
                engine.llm.reset_prefix_cache()
    found = sum(step.total_num_scheduled_tokens for step in steps)
    assert (found > 2 * expected) if is_emptied else (found == expected < computed + 5 * 32)


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


def test_rollout_and_trainer_agree_only_with_the_same_adapter_and_noise(engine, policy):
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


def test_ranks_of_one_engine_have_different_numbers_of_turns(engine, monkeypatch):
    theirs = [Request(PROMPTS[0], seed, 4) for seed in range(3)]
    waiting = [theirs, theirs[:1], []]  # what the other rank asks for: it goes on after this one

    def gather(gathered, own, group):
        gathered[:] = [(waiting.pop(0), False), own]

    engine.begin(0, None)
    with engine.episodes():
        alone = engine.generate(PROMPTS[:1], None, 4)
    monkeypatch.setattr(engine, "_tensor_parallel_group", "of two")
    monkeypatch.setattr(engine, "_tensor_parallel", 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    computed, generate = [], sampling.generate
    monkeypatch.setattr(sampling, "generate", lambda llm, asked, *o: computed.append(asked) or generate(llm, asked, *o))
    engine.begin(0, None)
    with engine.episodes():
        assert engine.generate(PROMPTS[:1], None, 4)[1] == alone[1]
    assert [len(prompts) for prompts in computed] == [4, 1] and not waiting
    waiting.append(theirs)
    with pytest.raises(KeyError), engine.episodes():
        raise KeyError("the rank that fails waits for nobody")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_one_engine_go_on_together(engine, rank, monkeypatch):
    """Check that both ranks take the turns of both, whoever asks for them, and each gets its own."""
    theirs = [[Request(PROMPTS[1], seed, 4) for seed in range(3)], [Request(PROMPTS[1], 9, 2)]]
    asked, own = [], []

    def gather(gathered, given, group):
        asked.append(given[0])
        others = (theirs.pop(0) if theirs else [], False)
        gathered[:] = [others, given] if rank else [given, others]

    engine.begin(0, None)
    turns = [Turn(PROMPTS[row], row, 0, 3 + row) for row in (0, 1)]

    def go_on(ended):
        own.extend((turn.place, turn.number, len(answer[0])) for turn, answer in ended)
        return [Turn([*turn.tokens, *answer[0]], turn.place, 1, 5) for turn, answer in ended if turn.number == 0]

    monkeypatch.setattr(engine, "_sampling", {**engine._sampling, "ignore_eos": True})
    monkeypatch.setattr(engine, "_tensor_parallel_group", "of two")
    monkeypatch.setattr(engine, "_tensor_parallel", 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "barrier", lambda device_ids: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    with engine.episodes():
        engine.play(turns, go_on, 4)
    assert own == [(0, 0, 3), (1, 0, 4), (0, 1, 5), (1, 1, 5)] and not theirs
    assert [len(requests) for requests in asked[:3]] == [2, 1, 1] and asked[-1] == []


def lengths_of(turns, episodes=64):
    """Return unequal lengths of the turns of each episode: most are short, some are of up to 24 tokens."""
    dice = random.Random(0)
    return [[min(24, 2 + int(dice.expovariate(0.2))) for _ in range(turns)] for _ in range(episodes)]


@pytest.fixture(scope="module")
def endless(start_engine):
    """Return an engine whose turns end with their tokens, and what it has scheduled in each step."""
    engine, steps = start_engine(64, generation_kwargs={"ignore_eos": True}, vllm_max_model_length=192), []
    scheduler = scheduler_here(engine.llm)
    with pytest.MonkeyPatch.context() as patched:
        schedule = scheduler.schedule

        def noted(*given, **named):
            scheduled = schedule(*given, **named)
            steps.append(sorted(scheduled.num_scheduled_tokens.values()))
            return scheduled

        patched.setattr(scheduler, "schedule", noted)
        yield engine, steps
        engine.close()


def played(endless, lengths, goes_on=True):
    """Play episodes with turns of these lengths, each followed by two tokens of a tool; return steps and tokens.

    Unless ``goes_on``, all episodes take a turn together.
    """
    engine, steps = endless
    engine.begin(0, None)
    steps.clear()
    histories = [[5 + row % 9, 7, 9] for row in range(len(lengths))]

    def turn(place, number):
        return Turn(histories[place], place, number, lengths[place][number])

    def go_on(ended):
        assert ended == sorted(ended, key=lambda one: one[0].place), "tools are called in order of place"
        for one, (ids, _) in ended:
            assert len(ids) == one.most
            histories[one.place] = [*histories[one.place], *ids, 3, 4]
        following = [(one.place, one.number + 1) for one, _ in ended]
        return [turn(*one) for one in following if one[1] < len(lengths[one[0]])] if goes_on else []

    with engine.episodes():
        turns = [turn(place, 0) for place in range(len(lengths))]
        engine.play(turns, go_on, 4)
        for number in range(1, len(lengths[0])) if not goes_on else ():
            engine.play([turn(place, number) for place in range(len(lengths))], go_on)
    return [step for step in steps if step], histories


def test_64_episodes_of_unequal_turns_take_the_steps_of_one_turn(endless):
    """Check the steps beside those of one turn with as many tokens, and those of episodes that wait for each other."""
    lengths = lengths_of(6)
    whole, _ = played(endless, [[sum(turns)] for turns in lengths])
    steps, histories = played(endless, lengths)
    waiting, same = played(endless, lengths, goes_on=False)
    assert 0 <= len(whole) - max(map(sum, lengths)) <= 1
    assert len(steps) <= 1.15 * len(whole) < 1.5 * len(whole) < len(waiting)
    assert histories == same, "what is sampled depends on place and turn alone"


def test_an_error_between_turns_leaves_nothing_in_the_engine(endless):
    engine, _ = endless
    lengths = lengths_of(2, episodes=4)

    def go_on(ended):
        raise KeyError("a tool")

    with pytest.raises(KeyError, match="a tool"), engine.episodes():
        engine.play([Turn([5, 7, 9], place, 0, most) for place, (most, _) in enumerate(lengths)], go_on, 4)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    played(endless, lengths)


def test_tools_draw_as_if_there_were_no_engine(endless):
    engine, _ = endless
    torch.manual_seed(3)
    alone = torch.rand(6)
    torch.manual_seed(3)
    drawn, turns = [], [Turn([5, 7, 9], place, 0, 2 + place) for place in range(3)]
    with engine.episodes():
        engine.play(turns, lambda ended: drawn.append(torch.rand(2)) or (), 4)
    assert torch.equal(torch.cat(drawn), alone)


def test_images_are_refused(engine):
    with pytest.raises(ValueError, match="reads text only"):
        engine.generate(PROMPTS, [None] * len(PROMPTS), 4)


@pytest.fixture
def sleepy(engine, kv_events, monkeypatch):
    """Return the engine as if started with sleep mode, and the ordered list of what happens to it."""
    events = kv_events

    def note(owner, name, event):
        original = getattr(owner, name)

        def noted(*args, **options):
            events.append(event)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(engine._training, "vllm_enable_sleep_mode", True)
    monkeypatch.setattr(engine, "_is_lent", False)
    monkeypatch.setattr(engine, "_is_asleep", False)
    monkeypatch.setattr(engine.llm, "sleep", lambda level: events.append(f"sleep {level}"))
    monkeypatch.setattr(engine.llm, "wake_up", lambda: events.append("wake"))
    note(engine, "_snapshot", "swap")
    note(engine.llm, "enqueue", "generate")
    note(engine.llm, "generate", "score")
    yield engine, events
    engine._wake()


def test_an_engine_that_has_lent_its_weights_gives_its_kv_cache_between_rollouts(sleepy):
    engine, events = sleepy
    engine._training.vllm_enable_sleep_mode = False
    engine.begin(3, 0.01)
    expected = [engine.generate(PROMPTS, None, 4) for _ in range(2)]
    engine._training.vllm_enable_sleep_mode = True
    events.clear()
    lent = engine.frozen_weights()
    assert events == ["release"] and len(lent.linears) == 14
    engine.begin(3, 0.01)
    assert events == ["release", "resume", "zero", "swap"]
    assert engine.generate(PROMPTS, None, 4) == expected[0]
    assert events[4:] == ["generate", "release"]
    assert engine.generate(PROMPTS, None, 4) == expected[1]  # dynamic sampling asks again
    assert events[6:] == ["resume", "zero", "generate", "release"]
    engine.begin_evaluation()
    assert events[10:] == ["resume", "zero", "swap"]


def test_a_trainer_that_writes_into_the_lent_weights_ends_the_run(sleepy):
    engine, events = sleepy
    name, weight = next(iter(engine.frozen_weights().linears.items()))
    engine.check_weights()
    weight.weight.codes[3, 5] ^= 1
    with pytest.raises(KVCacheError, match="has changed"):  # the check before a checkpoint is saved
        engine.check_weights()
    with pytest.raises(KVCacheError, match=r"qkv_proj\.weight_packed has changed .* restart from the last checkpoint"):
        engine.begin(4, None)
    assert name.endswith("q_proj") and events == ["release"]
    weight.weight.codes[3, 5] ^= 1
    engine.begin(4, None)


def test_an_engine_stays_awake_for_all_turns_of_a_batch(sleepy):
    engine, events = sleepy
    engine.frozen_weights()
    engine.begin(3, None)
    events.clear()
    with engine.episodes():
        (ids, *_), *_ = engine.generate(PROMPTS, None, 4)
        for number in (1, 2):
            take(engine, [Turn(ids, 0, number, 4)])
    assert events == ["generate"] * 3 + ["release"]
    with engine.episodes():
        pass
    assert events[4:] == []


def test_an_engine_that_has_lent_nothing_sleeps_whole(sleepy):
    engine, events = sleepy
    engine.begin(3, None)
    engine.generate(PROMPTS, None, 4)
    engine.begin(4, None)
    assert events == ["swap", "generate", "sleep 1", "wake", "swap"]


@pytest.mark.parametrize("lent", [True, False])
def test_whatever_is_asked_of_a_sleeping_engine_wakes_it_and_scores_let_it_sleep_again(sleepy, lent):
    engine, events = sleepy
    asleep, awake = (["release"], ["resume", "zero"]) if lent else (["sleep 1"], ["wake"])
    if lent:
        engine.frozen_weights()
    engine.begin(3, None)
    engine.generate(PROMPTS, None, 4)
    events.clear()
    engine.score(PROMPTS[:2], [[5, 6], [7]])
    assert events == [*awake, "score", *asleep]
    engine.check_weights()
    events.clear()
    engine.serve_base()
    assert events == awake
    events.clear()
    engine.score(PROMPTS[:2], [[5, 6], [7]])
    engine.frozen_weights()
    assert events == ["score", *asleep, *awake, "release"]


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_engine_is_closed_awake_whatever_was_done_to_the_weights_it_lent(is_changed, start_engine, kv_events):
    engine = start_engine(16)
    engine.frozen_weights()
    engine.check_weights()  # an awake engine has nothing to compare with
    engine._training.vllm_enable_sleep_mode = True
    weight = next(iter(engine.frozen_weights().linears.values()))
    weight.weight.codes[3, 5] ^= is_changed
    engine.close()
    assert kv_events == (["release"] if is_changed else ["release", "resume", "zero"])
    engine.close()
