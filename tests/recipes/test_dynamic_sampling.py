import pytest
import torch

from qerl_recipes.dynamic_sampling import PromptStream, informative_groups, replace_groups


def test_the_stream_is_one_permutation_after_another():
    stream = PromptStream(5, seed=3)
    rounds = [stream.take(5) for _ in range(4)]
    assert all(sorted(taken) == [0, 1, 2, 3, 4] for taken in rounds)
    assert len({tuple(taken) for taken in rounds}) > 1
    assert rounds[0] != PromptStream(5, seed=4).take(5) or rounds[1] != PromptStream(5, seed=4, position=5).take(5)


@pytest.mark.parametrize("position", [0, 3, 5, 7, 13])
def test_promise_8_the_stream_continues_from_its_position(position):
    unbroken = PromptStream(5, seed=3).take(position + 9)
    assert PromptStream(5, seed=3, position=position).take(9) == unbroken[position:]


def test_groups_are_informative_where_rewards_differ():
    nan = torch.nan
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 0, 0.1 * 3, 0.3, 0.3, nan, nan, nan, nan, 1, 1, nan, 1, 0])
    assert informative_groups(rewards, 3).tolist() == [False, True, False, False, False, True]


def batch(rows, prompt_width, completion_width, value):
    """What TRL returns for ``rows`` completions, every entry ``value``."""
    return {
        "prompt_ids": torch.full((rows, prompt_width), value),
        "prompt_mask": torch.ones(rows, prompt_width, dtype=torch.long),
        "completion_ids": torch.full((rows, completion_width), value),
        "completion_mask": torch.ones(rows, completion_width, dtype=torch.long),
        "old_per_token_logps": torch.full((rows, completion_width), float(value)),
        "importance_sampling_ratio": torch.full((rows, completion_width), float(value)),
        "advantages": torch.full((rows,), float(value)),
        "num_items_in_batch": torch.tensor(rows * completion_width),
    }


@pytest.mark.parametrize(("wide", "narrow"), [((3, 4), (2, 6)), ((2, 6), (3, 4)), ((3, 4), (3, 4))])
def test_replaced_groups_are_padded_to_one_width(wide, narrow):
    ours, theirs = batch(6, *wide, 5), batch(4, *narrow, 7)
    merged = replace_groups(ours, theirs, [(2, 0), (0, 1)], 2, pad_token_id=9)
    prompt_width, width = max(wide[0], narrow[0]), max(wide[1], narrow[1])
    assert merged["advantages"].tolist() == [7, 7, 5, 5, 7, 7]
    for row in range(6):
        value, (prompt, completion) = (5, wide) if row in (2, 3) else (7, narrow)
        assert merged["prompt_ids"][row].tolist() == [9] * (prompt_width - prompt) + [value] * prompt
        assert merged["prompt_mask"][row].tolist() == [0] * (prompt_width - prompt) + [1] * prompt
        assert merged["completion_ids"][row].tolist() == [value] * completion + [9] * (width - completion)
        assert merged["completion_mask"][row].tolist() == [1] * completion + [0] * (width - completion)
        assert merged["old_per_token_logps"][row].tolist() == [value] * completion + [0] * (width - completion)
    assert ours["advantages"].tolist() == [5] * 6  # the caller's batch is as it was


def test_an_entry_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="'pixel_values'"):
        replace_groups({**batch(2, 1, 1, 0), "pixel_values": torch.zeros(1)}, batch(2, 1, 1, 0), [(0, 0)], 2, 0)


def equal_below_five(completions, prompts, **columns):
    """Every answer to a prompt that begins with 1 to 4 gets the same reward; the others' differ with every sample."""
    return [1.0 if int(prompt[0]) < 5 else float(i % 4) for i, prompt in enumerate(prompts)]


def test_groups_with_equal_rewards_are_replaced(make_trainer, make_nvfp4, read_metrics):
    trainer = make_trainer(make_nvfp4("qwen2"), equal_below_five, dynamic_sampling=True, max_steps=4, rows=32)
    seen, inner = [], trainer.compute_loss

    def watch(model, inputs, *args, **kwargs):
        texts = trainer.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        seen.append(
            (texts, inputs["advantages"].clone(), inputs["completion_mask"].sum(), inputs["num_items_in_batch"])
        )
        return inner(model, inputs, *args, **kwargs)

    trainer.compute_loss = watch
    trainer.train()
    records = read_metrics(trainer)
    assert sum(record["dropped_groups"] for record in records) > 0
    for (texts, advantages, tokens, items), record in zip(seen, records, strict=True):
        assert len(texts) == 8
        informative = [int(text[0]) >= 5 for text in texts]
        of_equal_groups = [a for a, useful in zip(advantages.tolist(), informative, strict=True) if not useful]
        assert of_equal_groups == [0.0] * len(of_equal_groups)
        assert sum(informative) == 4 * record["accepted_groups"]
        assert record["accepted_groups"] + record["filled_groups"] == 2
        assert (record["extra_tokens"] > 0) == (record["dropped_groups"] > 0)
        assert record["sampling_rounds"] <= 3
        assert items == tokens
    assert trainer.current_state().stream == trainer._stream.position > 0


def test_if_all_rewards_are_equal_the_batch_is_filled_and_teaches_nothing(make_trainer, make_nvfp4, read_metrics):
    def always_one(completions, **columns):
        return [1.0] * len(completions)

    settings = {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2, "max_steps": 1}
    trainer = make_trainer(make_nvfp4("qwen2"), always_one, **settings)
    trainer.train()
    (record,) = read_metrics(trainer)
    counts = {"accepted_groups": 0, "dropped_groups": 2, "filled_groups": 2, "sampling_rounds": 2}
    assert {name: record[name] for name in counts} == counts
    assert record["grad_norm"] == 0
    assert trainer._stream.position == 4
