"""Train a text classifier on one process or on many.

    ./launch.sh                                      # every GPU of this machine, or two CPU ranks
    ./launch.sh --train-file mine.tsv --epochs 5     # flags are those of train.py --help
    ./launch.sh --run-name first                     # the same name again resumes the run

Ranks, micro-batches and accumulation only compute a global batch: the results are the same.
"""

import gc

from metrics import METRICS
from training.settings.flags import parse_args

if __name__ == "__main__":
    CONFIG = parse_args(metrics=METRICS)  # before the slow imports: --help answers at once
    gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time

import logging

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import data
from model import build_model, build_tokenizer, loss_per_row
from training.checkpoint import run_folder
from training.checkpoint.model_folder import ModelFolder
from training.checkpoint.rng import seed_everything
from training.checkpoint.saver import Saver
from training.checkpoint.state import TrainState
from training.dataset.build import open_dataset
from training.distributed.prepare_model import prepare_model
from training.distributed.wrap import gradient_sync, wrap
from training.launch import worker
from training.launch.signals import StopRequest
from training.settings.config import TrainConfig
from training.step.auto_batch_size import fit_batch_size
from training.step.batch_plan import build_plan
from training.step.evaluation import Evaluator
from training.step.loss import ModelWithLoss
from training.step.optimizer import Schedule, build_optimizer, clip_gradients, step_if_finite
from training.step.start_check import check_model
from training.tracking.monitor import Monitor
from training.tracking.results import finish
from training.tracking.tracker import Tracker

log = logging.getLogger("training")


def main(config: TrainConfig, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stop = StopRequest(config.max_time)
    tracker = Tracker(config)
    # `source`: the checkpoint to resume from, or None. Nothing is written before `claim`, below.
    run, source = run_folder.choose(config)

    # -- data ------------------------------------------------------------------------------------
    built_from = config.from_folder(source)  # to resume, nothing is downloaded
    tokenizer, splits = open_dataset(built_from, data, build_tokenizer)
    train, val = splits["train"], splits.get("val")
    plan = build_plan(config, train)
    loader = DataLoader(
        train,
        sampler=plan,
        batch_size=None,  # the plan yields whole micro-batches
        num_workers=config.num_workers,
        persistent_workers=config.num_workers > 0,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own, so that starting it draws none of our numbers
    )
    total_steps = config.max_steps or config.epochs * plan.steps_per_epoch
    evaluation_steps = plan.evaluation_steps(config.evals_per_epoch)

    # -- model -----------------------------------------------------------------------------------
    seed_everything(config.seed)  # the same first weights on every rank
    model = prepare_model(build_model(built_from, tokenizer, train.labels), config, device)
    folder = ModelFolder(model, tokenizer, train.labels, config)
    with_loss = ModelWithLoss(model, loss_per_row, len(train.labels), config)
    if source is None:
        few_rows = check_model(with_loss, splits, config)  # what cannot work fails now
        folder.check_round_trip(build_model, few_rows)
    else:
        folder.freeze_as_in(source)
    wrapped = wrap(model, with_loss, device, config)
    optimizer = build_optimizer(model, config)
    schedule = Schedule(optimizer, config.schedule, total_steps, config.warmup_ratio)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    evaluator = Evaluator(model, config, loss_per_row, METRICS, splits, stop.agreed)
    tracker.describe(model, plan, splits)

    # -- resume ----------------------------------------------------------------------------------
    seed_everything(config.seed + 1 + rank)  # other dropout on every rank
    state = TrainState(folder)  # a part of your own is one entry in state.parts
    progress = state.progress
    monitor = Monitor(tracker, progress, plan, with_loss, schedule, scaler)
    state.parts |= {
        "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "monitor": monitor,
    }  # fmt: skip
    state.settings |= {
        "global_batch_size": plan.sizes.global_batch_size,
        "total_steps": total_steps,
        **{f"{name}_rows": store.identity() for name, store in splits.items() if name != "test"},
    }
    if source is not None:
        state.restore(source)
    run_folder.claim(run, source, progress)
    saver = Saver(run, state)
    tracker.open(run, progress, plan, splits, total_steps)

    # -- training --------------------------------------------------------------------------------
    model.train()
    fit_batch_size(config, plan, wrapped, model, optimizer)
    evaluator.dry_run()  # what would fail at the first evaluation fails now
    log.info(f"training to step {total_steps}, {plan.steps_per_epoch} steps per epoch, in {run}")
    monitor.start(loader)
    stop.ready()  # until here a signal ended this process at once: there was nothing to save
    save_due = False
    while True:
        # Evaluate, save, stop: every rank decides the same.
        stopped = stop.agreed(saver.error or tracker.error)
        result, is_best = None, False
        with monitor.throughput.pause():
            if progress.evaluation_due and val is not None and not stopped:
                result = evaluator.evaluate(val)
                stopped = result is None  # asked to stop in it: it is due again after resuming
            if result is not None:
                score = result.score(config.metric)
                schedule.evaluated(score)
                is_best = progress.evaluated(score)
                tracker.evaluated("val", result)
            monitor.check_replicas(was_evaluated=result is not None)
            stopped_early = progress.should_stop_early(config.early_stopping_patience)
            is_last = stopped or stopped_early or progress.step >= total_steps
            if val is None and is_last and not stopped:
                is_best = True  # without validation the last weights are the best
            unsaved = progress.step > saver.saved_step
            if save_due or is_best or result is not None or (is_last and unsaved):
                saver.save(is_best, is_last)
        if is_last:
            break

        # One optimizer step: batch, forward, loss, backward, clip, step, schedule, zero, log.
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for batch in monitor.micro_batches():
            with gradient_sync(wrapped, model, batch.plan.ends_step):
                loss = wrapped(batch.inputs, batch.labels, batch.weight).sum()
                # DDP averages over ranks; this makes it the mean over the whole global batch.
                scaler.scale(loss * (world_size / batch.plan.weight_sum)).backward()
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = clip_gradients(model, config.max_grad_norm)
        skipped = step_if_finite(optimizer, scaler, grad_norm)  # the same on all ranks
        schedule.step()
        optimizer.zero_grad()
        monitor.end_step(loss_sum, grad_norm, skipped)

        at_evaluation = progress.step == total_steps or progress.step_in_epoch in evaluation_steps
        progress.evaluation_due = at_evaluation and val is not None
        save_every = config.save_every
        save_due = at_evaluation or (save_every > 0 and progress.step % save_every == 0)

    # -- the end ---------------------------------------------------------------------------------
    monitor.skipped_steps.act_on_last()
    saver.wait()
    if not stopped and saver.has_best():
        optimizer.state.clear()  # makes room for the best weights
        folder.load(run / "best")
    finish(tracker, evaluator, splits, stopped)
    stop.close()
    tracker.close()
    run_folder.release()


if __name__ == "__main__":
    worker.run(main, CONFIG)
