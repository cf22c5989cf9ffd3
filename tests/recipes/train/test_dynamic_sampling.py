import pandas as pd
import pytest
import torch

from qerl_recipes.train.dynamic_sampling import (
    PromptStream,
    informative_groups,
    judged_by,
    refill,
    replace_groups,
)


def test_the_stream_is_one_permutation_after_another():
    stream = PromptStream(5, seed=3)
    rounds = [stream.take(5) for _ in range(4)]
    assert all(sorted(taken) == [0, 1, 2, 3, 4] for taken in rounds)
    assert len({tuple(taken) for taken in rounds}) > 1
    assert rounds[0] != PromptStream(5, seed=4).take(5) or rounds[1] != PromptStream(5, seed=4, position=5).take(5)


@pytest.mark.parametrize("position", [0, 3, 5, 7, 13])
def test_promise_08_the_stream_continues_from_its_position(position):
    unbroken = PromptStream(5, seed=3).take(position + 9)
    assert PromptStream(5, seed=3, position=position).take(9) == unbroken[position:]


def test_groups_are_informative_where_rewards_differ():
    nan = torch.nan
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0.1 * 3, 0.3, 0.3, nan, nan, nan, nan, 1, 1, nan, 1, 0])
    assert informative_groups(rewards, 3).tolist() == [False, True, False, False, False, True]


def test_groups_are_judged_by_accuracy_else_by_the_sum():
    nan = torch.nan
    rewards, weights = torch.tensor([[1.0, 0.25], [0.0, 2.25], [nan, 3.0], [nan, nan]]), torch.tensor([1.0, 0.5])

    def judged(names, metric=None):
        return judged_by(rewards, weights, names, metric).nan_to_num(nan=-1).tolist()

    assert judged(["accuracy", "format"]) == [1, 0, -1, -1]
    assert judged(["format", "accuracy"]) == [0.25, 2.25, 3, -1]
    assert judged(["accuracy", "format"], "format") == [0.25, 2.25, 3, -1]
    assert judged(["tags", "format"]) == judged(["accuracy", "format"], "total") == [1.125, 1.125, 1.5, -1]


def batch(rows, prompt_width, completion_width, first):
    """Return a batch as TRL does for ``rows`` completions; every entry of a row is ``first`` plus the row number."""
    values = first + torch.arange(rows)[:, None]
    return {
        "prompt_ids": values.repeat(1, prompt_width),
        "prompt_mask": torch.ones(rows, prompt_width, dtype=torch.long),
        "completion_ids": values.repeat(1, completion_width),
        "completion_mask": torch.ones(rows, completion_width, dtype=torch.long),
        "old_per_token_logps": values.repeat(1, completion_width).float(),
        "importance_sampling_ratio": values.repeat(1, completion_width).float(),
        "advantages": values[:, 0].float(),
        "num_items_in_batch": torch.tensor(rows * completion_width),
    }


@pytest.mark.parametrize(("wide", "narrow"), [((3, 4), (2, 6)), ((2, 6), (3, 4)), ((3, 4), (3, 4))])
def test_replaced_groups_are_padded_to_one_width(wide, narrow):
    ours, theirs = batch(6, *wide, 10), batch(4, *narrow, 20)
    merged = replace_groups(ours, theirs, [(2, 0), (0, 1)], 2, pad_token_id=9)
    prompt_width, width = max(wide[0], narrow[0]), max(wide[1], narrow[1])
    expected = [22, 23, 12, 13, 20, 21]  # group 0 becomes the fresh batch's group 1, and group 2 its group 0
    assert merged["advantages"].tolist() == expected
    for row, value in enumerate(expected):
        prompt, completion = wide if row in (2, 3) else narrow
        assert merged["prompt_ids"][row].tolist() == [9] * (prompt_width - prompt) + [value] * prompt
        assert merged["prompt_mask"][row].tolist() == [0] * (prompt_width - prompt) + [1] * prompt
        assert merged["completion_ids"][row].tolist() == [value] * completion + [9] * (width - completion)
        assert merged["completion_mask"][row].tolist() == [1] * completion + [0] * (width - completion)
        for name in ("old_per_token_logps", "importance_sampling_ratio"):
            assert merged[name][row].tolist() == [value] * completion + [0] * (width - completion)
    assert ours["advantages"].tolist() == [10, 11, 12, 13, 14, 15]  # the caller's batch is unchanged


def test_an_entry_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="'pixel_values'"):
        replace_groups({**batch(2, 1, 1, 0), "pixel_values": torch.zeros(1)}, batch(2, 1, 1, 0), [(0, 0)], 2, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_fills_its_own_groups_of_those_left_over(rank):
    """Check four groups of two on two processes.

    Nothing can be learnt from the first group of either process, nor from the last group.
    """
    judged = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0])
    ours = {"advantages": torch.full((4,), 0.5), "completion_mask": torch.ones(4, 3, dtype=torch.long)}
    limits = {"num_generations": 2, "max_rounds": 0, "pad_token_id": 9, "rank": rank, "ranks": 2}
    refilled, counts = refill(ours, judged, PromptStream(5, 0), None, None, **limits)
    rows = [teaches for teaches in (rank == 0 and group == 1 for group in (0, 1)) for _ in range(2)]
    assert refilled["advantages"].tolist() == [0.5 * teaches for teaches in rows]
    assert refilled["completion_mask"].tolist() == [[int(teaches)] * 3 for teaches in rows]
    assert counts == {"accepted_groups": 1, "dropped_groups": 3, "filled_groups": 3, "rounds": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_scores_a_share_of_the_fresh_prompts(rank):
    """Check two rounds of resampling after three of four groups were dropped.

    In the first round only the third fresh group has unequal rewards; in the second round the first one has.
    """
    judged, stream, scored = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0]), PromptStream(9, 0), []
    ours = batch(4, 2, 3, 10 + 10 * rank)

    def score(rows):
        scored.append(rows)
        values = [[5.0, 5.0, 6.0, 6.0, 0.0, 1.0, 0.0, 9.0], [0.0, 1.0, 3.0, 3.0]][len(scored) - 1]
        return batch(2 * len(rows), 2, 3, 100 * len(scored) + 20 * rank), torch.tensor(values)

    def gather(sent):
        """Return the batches of both processes; the other process's differs from ours in its first entry alone."""
        first = 100 * len(scored)
        return [batch(2 * len(scored[-1]), 2, 3, first + 20 * other) for other in (0, 1)]

    limits = {"num_generations": 2, "max_rounds": 2, "pad_token_id": 9, "rank": rank, "ranks": 2}
    refilled, counts = refill(ours, judged, stream, score, gather, **limits)
    drawn = PromptStream(9, 0).take(5)
    assert scored == ([drawn[:2], drawn[3:4]] if rank == 0 else [[drawn[2], drawn[2]], drawn[4:5]])
    expected = [120, 121, 12, 13] if rank == 0 else [200, 201, 0, 0]
    assert refilled["advantages"].tolist() == expected
    assert counts == {"accepted_groups": 3, "dropped_groups": 3, "filled_groups": 1, "rounds": 2}
    assert refilled["completion_mask"].sum(dim=1).tolist() == [3, 3, 3 - 3 * rank, 3 - 3 * rank]


def equal_below_five(completions, prompts, **columns):
    """Give every answer to a prompt that begins with 1 to 4 the same reward, and vary the reward of the others."""
    return [1.0 if int(prompt[0]) < 5 else float(i % 4) for i, prompt in enumerate(prompts)]


def test_groups_with_equal_rewards_are_replaced(make_trainer, make_nvfp4, read_metrics):
    settings = {"dynamic_sampling": True, "log_completions": True, "max_steps": 4}
    trainer = make_trainer(make_nvfp4("qwen2"), equal_below_five, rows=32, **settings)
    seen, inner = [], trainer.compute_loss

    def watch(model, inputs, *args, **kwargs):
        texts = trainer.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        seen.append(
            (texts, inputs["advantages"].clone(), inputs["completion_mask"].sum(dim=1), inputs["num_items_in_batch"])
        )
        return inner(model, inputs, *args, **kwargs)

    trainer.compute_loss = watch
    trainer.train()
    records = read_metrics(trainer)
    assert sum(record["dropped_groups"] for record in records) > 0
    for (texts, advantages, tokens, items), record in zip(seen, records, strict=True):
        assert len(texts) == 8
        informative = [int(text[0]) >= 5 for text in texts]
        of_uniform_groups = [a for a, useful in zip(advantages.tolist(), informative, strict=True) if not useful]
        assert of_uniform_groups == [0.0] * len(of_uniform_groups)
        assert sum(informative) == 4 * record["accepted_groups"]
        assert record["accepted_groups"] + record["filled_groups"] == 2
        assert (record["extra_tokens"] > 0) == (record["dropped_groups"] > 0)
        assert record["sampling_rounds"] <= 3
        # A group that could not be replaced counts neither in the loss nor in its divisor.
        if record["accepted_groups"] > 0:
            assert [count > 0 for count in tokens.tolist()] == informative
        assert items == tokens.sum()
        table = pd.read_parquet(f"{trainer.args.output_dir}/completions/completions_{record['step']:05d}.parquet")
        first = [int(prompt[0]) >= 5 for prompt in table["prompt"]]
        assert len(first) == 8 and sum(first) == 8 - 4 * record["dropped_groups"], "the table has what was drawn first"
    assert trainer.recorded_state().stream == trainer.stream.position > 0


def accuracy(completions, **columns):
    return [0.0] * len(completions)


def tags(completions, **columns):
    return [float(i % 4) for i in range(len(completions))]


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        ({}, 2),  # no right answer, however the tags differ
        ({"dynamic_sampling_metric": "tags"}, 0),
    ],
    ids=["accuracy", "tags"],
)
def test_a_group_is_replaced_by_the_reward_that_the_recipe_names(
    settings, dropped, make_trainer, make_nvfp4, read_metrics
):
    once = {"dynamic_sampling_max_rounds": 1, "max_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), [accuracy, tags], dynamic_sampling=True, **once, **settings)
    trainer.train()
    (record,) = read_metrics(trainer)
    assert (record["dropped_groups"], record["filled_groups"]) == (dropped, dropped)
    assert (record["grad_norm"] > 0) == (dropped == 0)


def only_the_second_group_differs(completions, **columns):
    return [float(i % 4) if i >= 4 else 0.0 for i in range(len(completions))]


@pytest.mark.parametrize("pack_tokens", [0, 16384])
def test_a_micro_batch_without_a_useful_group_adds_nothing(pack_tokens, make_trainer, make_nvfp4, read_metrics):
    """Check micro-batches of one completion: those of the group that is left over hold none of its tokens."""
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": 1, "loss_type": "bnpo"}
    settings = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 1, "pack_tokens": pack_tokens, **steps}
    trainer = make_trainer(make_nvfp4("qwen2"), only_the_second_group_differs, **settings)
    seen, inner = [], trainer.compute_loss

    def watch(model, inputs, *args, **kwargs):
        loss = inner(model, inputs, *args, **kwargs)
        seen.append((int(inputs["completion_mask"].sum()), float(loss)))
        return loss

    trainer.compute_loss = watch
    trainer.train()
    (record,) = read_metrics(trainer)
    assert (record["accepted_groups"], record["filled_groups"]) == (1, 1)
    assert [loss for tokens, loss in seen if tokens == 0] == [0.0] * 4
    assert len([tokens for tokens, _ in seen if tokens]) == 4 and record["grad_norm"] > 0


@pytest.mark.parametrize("pack_tokens", [0, 16384])
def test_loss_and_gradient_are_of_the_sampled_tokens_alone(pack_tokens, make_trainer, make_nvfp4, read_metrics):
    """Compare loss and gradient with values computed from plain logits.

    Each completion contains five tokens of a tool's answer, which must not count.
    """
    keys = {"dynamic_sampling": True, "loss_type": "dapo", "dtype": torch.float32, "max_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), tags, max_grad_norm=0.0, pack_tokens=pack_tokens, **keys)
    of_tool, expected = [5, 6, 7, 8, 9], {}

    def rollout(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        _, sampled, logprobs, _ = trainer.vllm_generation.generate(ids, None, trainer.num_generations)
        flat = [[each[0] for each in row] for row in logprobs]
        return {
            "prompt_ids": ids,
            "completion_ids": [[*row[:1], *of_tool, *row[1:]] for row in sampled],
            "logprobs": [[*row[:1], *[0.0] * len(of_tool), *row[1:]] for row in flat],
            "env_mask": [[1] + [0] * len(of_tool) + [1] * (len(row) - 1) for row in sampled],
        }

    def watch(model, inputs, *args, **kwargs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        masks = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logits = model(input_ids=ids, attention_mask=masks).logits[:, -width - 1 : -1].log_softmax(dim=-1)
        logps = logits.gather(2, inputs["completion_ids"][:, :, None])[:, :, 0]
        is_sampled = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        weight = (logps.detach() - inputs["sampling_per_token_logps"]).exp().clamp(max=2.0)
        each = -(logps - logps.detach()).exp() * weight * inputs["advantages"][:, None]
        loss = each[is_sampled].sum() / is_sampled.sum()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.autograd.grad(loss, trained)
        expected["loss"] = loss.item()
        expected["grad_norm"] = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        expected["tokens"] = int(is_sampled.sum())
        return inner(model, inputs, *args, **kwargs)

    inner = trainer.compute_loss
    trainer.rollout_func, trainer.compute_loss = rollout, watch
    trainer.train()
    (record,) = read_metrics(trainer)
    assert record["dropped_groups"] == 0 and expected["tokens"] < 8 * 12
    assert {name: record[name] for name in ("loss", "grad_norm")} == pytest.approx(
        {name: expected[name] for name in ("loss", "grad_norm")}, rel=1e-4
    )
    assert record["grad_norm"] > 1e-3
