"""Train a text classifier on one process or on many.

    ./launch.sh                                      # every GPU of this machine, or two CPU ranks
    ./launch.sh --train-file mine.tsv --epochs 5     # flags are those of train.py --help
    ./launch.sh --run-name first                     # the same name again continues the run

Ranks, micro-batches and accumulation are only ways to compute a global batch: the numbers stay.
"""

import gc

from training.settings.flags import parse_args

if __name__ == "__main__":
    CONFIG = parse_args()  # before the slow imports: --help and a mistyped flag answer at once
    gc.disable()  # they leave little garbage, and looking for it takes a tenth of their time

import logging
import math
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import data
from model import build_model, build_tokenizer, loss_per_row, read_weights
from training.checkpoint import run_folder as runs
from training.checkpoint import state
from training.checkpoint.rng import seed_everything
from training.checkpoint.saver import Saver
from training.dataset.build import open_splits
from training.dataset.tokenizer import prepare_tokenizer
from training.distributed import ranks as distributed
from training.distributed import replicas, watchdog
from training.distributed import wrap as wrap_module
from training.distributed.full_state import load_everywhere, plain, whole
from training.distributed.ranks import gather, is_main, on_main
from training.distributed.wrap import num_replicas
from training.launch import worker as process
from training.launch.signals import Interrupted, StopRequest
from training.settings.batch_sizes import batch_sizes
from training.settings.config import TrainConfig
from training.step.batch_plan import BatchPlan
from training.step.batch_size import Memory
from training.step.compile import Compiler
from training.step.evaluation import evaluate
from training.step.loss import WithLoss
from training.step.optimizer import Schedule, build_optimizer, learning_rates
from training.step.weights import row_weight
from training.tracking.results import (
    describe_data,
    describe_model,
    describe_step,
    finish,
    keep_bad_rows,
)
from training.tracking.skipped_steps import SkippedSteps, step_if_finite
from training.tracking.speed import flops_per_token, peak_flops, peak_memory
from training.tracking.throughput import Meter, RunningLoss
from training.tracking.tracker import Tracker, start_console

log = logging.getLogger("training")


def main(config: TrainConfig, device: torch.device) -> None:
    began = time.perf_counter()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stop = StopRequest(config.max_time)
    start_console(is_main())
    run, source = on_main(lambda: runs.choose(config))
    copies = num_replicas(config.strategy)
    sizes = batch_sizes(config, world_size, copies)
    describe_step(sizes, device)

    # -- data ------------------------------------------------------------------------------------
    tokenizer = prepare_tokenizer(config, data, build_tokenizer)
    train, val, test = open_splits(config, data, tokenizer)
    splits = {"train": train, "val": val, "test": test}
    distributed.check_same_on_all_ranks([s and s.folder.name for s in splits.values()], "the data")
    describe_data(splits, config.max_length)
    compiler = Compiler(config, train)
    plan = BatchPlan(train, sizes, seed=config.seed, group_by_length=config.group_by_length,
                     row_weight=row_weight(config, train), lengths=compiler.lengths)  # fmt: skip
    loader = DataLoader(
        train,
        sampler=plan,
        batch_size=None,  # the plan yields whole micro-batches
        num_workers=config.num_workers,
        persistent_workers=config.num_workers > 0,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # its own, so that starting it draws no number of ours
    )
    total_steps = config.max_steps or config.epochs * plan.steps_per_epoch
    eval_steps = plan.spread(config.evals_per_epoch)

    # -- model -----------------------------------------------------------------------------------
    seed_everything(config.seed)  # the same first weights on every rank
    model = build_model(config, tokenizer, train.labels).to(device)
    if config.precision == "fp64":
        model.double()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    describe_model(model)
    autocast = wrap_module.autocast(device, config.precision)
    if source is not None:
        load_everywhere(model, lambda: read_weights(model, source))
    with_loss = WithLoss(model, loss_per_row, len(train.labels), config.label_smoothing, autocast)
    compiler.compile(with_loss)
    wrapped = wrap_module.wrap(model, with_loss, device, config)
    optimizer = build_optimizer(model, config)
    schedule = Schedule(optimizer, config.schedule, total_steps, config.warmup_ratio)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    measure = partial(evaluate, model, device=device, autocast=autocast, stopping=stop.agreed,
                      batch_size=config.eval_batch_size)  # fmt: skip

    # -- resume ----------------------------------------------------------------------------------
    seed_everything(config.seed + 1 + rank)  # another dropout on every rank
    at, loss_sum = state.Progress(), RunningLoss(device)
    skipped = SkippedSteps(run, plan, train, schedule, scaler, config.max_bad_steps)
    parts: dict[str, state.Part] = {
        "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "skipped": skipped,
    }  # fmt: skip
    learned = config.resume_settings() | {
        "global_batch_size": sizes.global_batch_size, "total_steps": total_steps,
        "data": [train.folder.name, val and val.folder.name],
    }  # fmt: skip
    if source is not None:
        state.restore(source, at, parts, loss_sum, learned, config.resume_anyway)
    if not on_main(lambda: runs.claim(run, source, at.step, at.best_step)):
        at.best_score, at.best_step = -math.inf, 0  # those weights are not here: find others

    # -- ready -----------------------------------------------------------------------------------
    tracker = Tracker(run, config, device, is_main(), at)
    on_main(lambda: keep_bad_rows(run, splits))
    saver = Saver(run, model, tokenizer, config.keep_checkpoints)
    parameters = [p for p in model.parameters() if p.requires_grad]
    memory = Memory(wrapped, model, parameters, plan, config)
    memory.fit(train, device)
    meter = Meter(flops_per_token(model), peak_flops(device, config.precision, copies))
    stop.ready()  # until here a signal ended this process at once: there was nothing to save

    def validate() -> bool:
        """Evaluate and tell the schedule. Returns whether these weights are the best so far."""
        assert val is not None
        result = measure(store=val)
        score = result.metrics[config.metric] * (-1 if config.metric == "loss" else 1)
        score = score if math.isfinite(result.metrics["loss"]) else math.nan  # broken weights
        schedule.evaluated(score)
        best = at.evaluated(score)
        note = f"  best {config.metric} " + ("so far" if best else f"was at step {at.best_step}")
        replicas.check_replicas(model)
        tracker.evaluated(at.step, at.step / plan.steps_per_epoch, "val", result, note)
        return best

    def save(best: bool) -> None:
        watchdog.report("saving", at.step)
        weights = whole(model.state_dict())
        content = state.collect(at, parts, loss_sum, learned)
        last = stopped or early or at.step >= total_steps
        on_main(partial(saver.save, at.step, weights, content, best, last))

    stopped = early = False
    if val is not None and source is None:
        measure(store=val, trial=True)  # what would fail at the first evaluation fails now
    if at.evaluation_due:  # the run was stopped in it
        try:
            best, at.evaluation_due = validate(), False
            save(best)
        except Interrupted:
            stopped = True

    # -- training --------------------------------------------------------------------------------
    log.info("training to step %d, %d in an epoch; %s", total_steps, plan.steps_per_epoch, run)
    tracker.start_bar(total_steps, at.step)
    early = at.should_stop_early(config.early_stopping_patience)
    model.train()
    meter.reset()
    while at.step < total_steps and not stopped and not early:
        plan.set_epoch(at.epoch, at.step_in_epoch)
        for batch in meter.timed(loader):
            micro = batch.plan
            inputs = {k: v.to(device, non_blocking=True) for k, v in batch.inputs.items()}
            labels = batch.labels.to(device, non_blocking=True)
            weight = batch.weight.to(device, non_blocking=True)  # (batch,)
            watchdog.report("training", at.step + 1, inputs["input_ids"].shape)
            with memory.trying(micro.ends_step):
                loss = wrapped(inputs, labels, weight).sum()  # one from each copy of the model
                # DDP averages over ranks; this makes it the mean over the whole global batch.
                scaler.scale(loss * (world_size / micro.weight_sum)).backward()
                loss_sum.add(loss)
            if not micro.ends_step:
                continue
            if memory.must_repeat(loss_sum):
                break
            replicas.check_gradients(model, parameters)
            scaler.unscale_(optimizer)
            grad_norm = plain(clip_grad_norm_(parameters, config.max_grad_norm or math.inf))
            bad = step_if_finite(optimizer, scaler, grad_norm)  # alike on all ranks
            schedule.step()
            optimizer.zero_grad()

            skipped.add(bad, at)
            loss_sum.end_step(micro.weight_sum, bad)
            at.end_step(plan.steps_per_epoch)
            meter.add(micro)
            tracker.advance()
            if at.step % config.log_every == 0 or at.step == total_steps:
                tracker.train_step(at.step, at.step / plan.steps_per_epoch, {
                    "loss": loss_sum.mean(),
                    **learning_rates(optimizer),
                    "grad_norm": grad_norm.item(),
                    "loss_scale": scaler.get_scale(),
                    **meter.rates(), **compiler.counted(),
                })  # fmt: skip
                meter.reset()

            # -- evaluate, save, stop: every rank decides the same ---------------------------------
            stopped = stop.agreed(saver.error or tracker.error)
            of_epoch = at.step_in_epoch or plan.steps_per_epoch  # the last one is not step 0
            at_evaluation = at.step == total_steps or of_epoch in eval_steps
            at_save = bool(config.save_every) and at.step % config.save_every == 0
            if config.check_replicas_every and at.step % config.check_replicas_every == 0:
                replicas.check_replicas(model)
            if not (stopped or at_evaluation or at_save):
                continue
            with meter.pause():
                best, at.evaluation_due = False, at_evaluation and val is not None
                if at.evaluation_due and not stopped:  # else it is the first thing after resuming
                    try:
                        best, at.evaluation_due = validate(), False
                    except Interrupted:
                        stopped = True
                early = at.should_stop_early(config.early_stopping_patience)
                save(best)
            if stopped or early or at.step >= total_steps:
                break

    # -- the end ---------------------------------------------------------------------------------
    skipped.settle()
    if not stopped and val is None:
        weights = whole(model.state_dict())
        on_main(partial(saver.save, at.step, weights, None, best=True, last=True))
    on_main(saver.wait)
    if on_main((run / "best").exists) and not stopped:
        optimizer.state.clear()  # makes room for the best weights
        load_everywhere(model, lambda: read_weights(model, run / "best"))
    facts = {
        "stopped": stopped, "step": at.step, "epoch": at.step / plan.steps_per_epoch,
        "best_step": at.best_step or at.step, "early": early, "metric": config.metric,
        "labels": train.labels, "peak_memory": gather(peak_memory(device)),
        "timings": {"seconds": time.perf_counter() - began},
    }  # fmt: skip
    final = {} if stopped else {k: s for k, s in splits.items() if s is not None and k != "train"}
    finish(run, config, tracker, measure, final, facts)
    stop.close()
    tracker.close()
    runs.release()


if __name__ == "__main__":
    process.run(main, CONFIG)
