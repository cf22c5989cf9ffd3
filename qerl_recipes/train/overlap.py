"""Train on one rollout while a server computes the next one: ``overlap: 1``.

A rollout is a flight: in a thread it resets environments, asks the server and calls tools. It lands when its batch is
due, or before an evaluation or a checkpoint. What follows its last turn waits for that. So no more than one thread has
collectives, metrics and the model at a time.

Each rollout but the first is one rollout old. Importance weights are of the present adapter over the one that sampled,
and the loss clips as it does without. (TRL's AsyncGRPO puts the sampled log-probabilities into the clipped ratio.)
Source: J. Hilton et al., Batch size-invariance for policy optimization (2022), the decoupled objective; W. Fu et al.,
AReaL (2025).

How far engine and trainer differ for one adapter is measured on the first group, with the adapter that sampled.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from qerl_recipes.rollout.interface import Snapshot
from qerl_recipes.train import loss

AGE, SEEN = "adapter_age", "num_tokens"  # a metric of ours; TRL's number of tokens so far, of which it keeps the last


class Begun(NamedTuple):
    """Hold what a rollout began with: sigma and number of the noise that the trainer shares, and figures to record."""

    noise: tuple[float, int] | None
    record: dict[str, float]


def _work(jobs: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        jobs.get()()


class Flight:
    """Call ``roll_out`` in the thread ``worker``, once ``fly`` is one of its jobs; the rest is for ``Landed``."""

    def __init__(self, worker: threading.Thread, roll_out: Callable[[], Any], begun: Begun, sampled_after: int) -> None:
        self.begun, self.sampled_after, self._worker, self._roll_out = begun, sampled_after, worker, roll_out
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._result: Future[Any] = Future()

    def fly(self) -> None:
        """Take off, in the worker's thread."""
        _settle(self._result, self._roll_out)
        self._calls.put(None)

    def in_main(self, function: Callable[[], Any]) -> Any:
        """Return what ``function`` returns in the landing thread; any thread but the worker's calls it at once."""
        if threading.current_thread() is not self._worker:
            return function()
        answer: Future[Any] = Future()
        self._calls.put(lambda: _settle(answer, function))
        return answer.result()

    def land(self) -> Any:
        """Do what the thread has to do in this one, and return what ``roll_out`` returns, or raise its error."""
        while (call := self._calls.get()) is not None:
            call()
        return self._result.result()


def _settle(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


@dataclass(frozen=True)
class Landed:
    """Hold a rollout that has yet to be trained on: TRL's batch, and the metrics and completions that it has logged.

    ``mismatch`` compares engine and trainer. ``sampled_after`` is how many rollouts the adapter had learnt from.
    """

    begun: Begun
    sampled_after: int
    batch: dict[str, Any]
    logged: dict[str, list[float]]
    table: dict[str, Any]
    mismatch: loss.Measured


class Overlap:
    """Keep the rollouts of one QerlGRPOTrainer a rollout ahead."""

    policy: Snapshot  # of the flight, a copy

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # one thread for all flights: the processes that an environment starts end with the thread that started them
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker = threading.Thread(target=_work, args=[self._jobs], name="rollouts", daemon=True)
        self._worker.start()
        self.flight: Flight | None = None
        self._landed: Landed | None = None

    def next(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the batch of the prompts ``rows``, and let the next take off; raise the rollout's error."""
        trainer = self._trainer
        rollout = trainer.rollout()
        if self._landed is None and self.flight is None:
            self._take_off(rollout, rows)
        self.land()
        landed, self._landed = self._landed, None
        assert landed is not None
        record = {**landed.begun.record, AGE: rollout - landed.sampled_after}
        trainer.train_on(Begun(landed.begun.noise, record))
        for name, values in landed.logged.items():
            logged = trainer._metrics["train"][name]
            logged[:] = [*([] if name == SEEN else logged), *values]
        _extend(trainer._logs, landed.table)
        trainer._sums.add(landed.mismatch)
        if rollout + 1 < trainer.rollouts():
            self._take_off(rollout + 1, self._rows(rollout + 1))
        return landed.batch

    def _take_off(self, rollout: int, rows: list[dict[str, Any]]) -> None:
        trainer = self._trainer
        self.policy = _copied(trainer.snapshot())
        begun = trainer.begin_rollout(rollout)
        # a thread begins on the first GPU; the device of a single process names no number
        gpu = torch.cuda.current_device() if trainer.accelerator.device.type == "cuda" else None

        def roll_out() -> dict[str, Any]:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            return trainer.roll_out(rows)

        self.flight = Flight(self._worker, roll_out, begun, trainer.rollout())
        self._jobs.put(self.flight.fly)  # now: the thread looks for its flight

    def _rows(self, rollout: int) -> list[dict[str, Any]]:
        """Return the prompts that the data loader of this process will yield for a rollout still to come."""
        trainer, args = self._trainer, self._trainer.args
        sampler = GRPOTrainer._get_train_sampler(trainer)
        repeated = args.generation_batch_size * args.steps_per_generation * args.num_iterations
        epoch, place = divmod(rollout, len(sampler) // repeated)
        if hasattr(sampler, "generator"):
            sampler.generator.manual_seed(args.seed + epoch)  # as on_epoch_begin does
        share = args.generation_batch_size // trainer.accelerator.num_processes
        first = place * repeated + trainer.accelerator.process_index * share
        return [dict(trainer.train_dataset[row]) for row in itertools.islice(sampler, first, first + share)]

    def land(self) -> None:
        """Wait for a flight, if there is one, and score it; server, environments and model are free then."""
        if self.flight is None:
            return
        trainer, begun = self._trainer, self.flight.begun
        trainer._noise = begun.noise
        trainer._set_noise()  # whatever is computed for a batch is computed with its noise
        with trainer.logging_apart():
            try:
                batch, sampled_after = self.flight.land(), self.flight.sampled_after
            finally:
                self.flight = None
            kept = _plain(trainer._logs) if trainer.log_completions else {}
            values = dict(trainer._metrics["train"])
        self._landed = Landed(begun, sampled_after, batch, values, kept, self._compared(batch))

    @torch.no_grad()
    def _compared(self, batch: Mapping[str, torch.Tensor]) -> loss.Measured:
        """Compare engine and trainer on the first group of ``batch``, with the adapter and norms that sampled."""
        trainer = self._trainer
        group = {name: tensor[: trainer.num_generations] for name, tensor in batch.items() if tensor.dim()}
        ids, mask = (torch.cat([group[f"prompt_{of}"], group[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
        own, width = _copied(trainer.snapshot()), group["completion_ids"].shape[1]
        trainer.load_policy(self.policy)
        try:
            with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
                logps = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, width, batch_size=trainer.args.per_device_train_batch_size
                )[0]
        finally:
            trainer.load_policy(own)
        return loss.distance(logps, group["sampling_per_token_logps"], loss.mask_of(group))

    def save(self, folder: Path) -> None:
        """Write the rollout that has landed to ``folder``, if there is one; each process has a file of its own."""
        if self._landed is not None:
            landed = self._landed
            content = {**vars(landed), "begun": tuple(landed.begun), "mismatch": asdict(landed.mismatch)}
            torch.save(content, folder / self._file())

    def load(self, folder: Path) -> None:
        """Take over the rollout that ``save`` has written; without one, as at a run's end, the next takes off anew."""
        path = folder / self._file()
        if path.is_file():
            content = torch.load(path, map_location=self._trainer.accelerator.device, weights_only=True)
            content |= {"begun": Begun(*content["begun"]), "mismatch": loss.Measured(**content["mismatch"])}
            self._landed = Landed(**content)

    def _file(self) -> str:
        return f"rollout_{self._trainer.accelerator.process_index}.pt"


def _copied(policy: Snapshot) -> Snapshot:
    return replace(policy, tensors={name: tensor.detach().clone() for name, tensor in policy.tensors.items()})


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {of: list(rows) for of, rows in column.items()} if isinstance(column, dict) else list(column)
        for name, column in table.items()
    }


def _extend(table: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, column in more.items():
        parts = column.items() if isinstance(column, dict) else [(None, column)]
        for of, rows in parts:
            (table[name] if of is None else table[name][of]).extend(rows)
