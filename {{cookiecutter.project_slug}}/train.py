"""Train a text classifier on one process or on many.

    ./launch.sh                                      # every GPU of this machine, or two CPU ranks
    ./launch.sh --train-file mine.tsv --epochs 5     # any setting of config.toml is a flag
    ./launch.sh --run-name first                     # the same name again continues the run
    python train.py --help

The global batch decides what is learned. Ranks, micro-batches and accumulation are ways to compute
it, so the numbers are the same on one CPU and on many GPUs.
"""

from training.flags import parse_args

if __name__ == "__main__":
    CONFIG = parse_args()  # before the slow imports: --help and a mistyped flag answer at once

import logging
import math
import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import data
from model import build_model, build_tokenizer, load_weights, loss_per_row
from training import checkpoint, distributed, runs
from training.config import TrainConfig, batch_sizes
from training.distributed import gather, is_main, on_main, reduce_tensor
from training.evaluation import evaluate
from training.optimizer import Schedule, build_optimizer, learning_rates
from training.results import describe_data, describe_model, finish, keep_bad_rows
from training.rng import rng_state, seed_everything, set_rng_state
from training.sampler import BatchPlan
from training.tokenise import open_splits, prepare_tokenizer
from training.tracking import Meter, Tracker, start_console
from training.weights import row_weight, weighted_sum

log = logging.getLogger("training")


def main(config: TrainConfig, device: torch.device) -> None:
    began = time.perf_counter()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stop = distributed.StopRequest()
    start_console(is_main())
    run, source = on_main(lambda: runs.choose(config))
    sizes = batch_sizes(config, world_size)
    log.info("a step is %d rows: %d ranks on %s x %d accumulated x at most %d rows at a time",
             sizes.global_batch_size, world_size, device.type, sizes.gradient_accumulation_steps,
             sizes.batch_size)  # fmt: skip

    # -- data ------------------------------------------------------------------------------------
    tokenizer = prepare_tokenizer(config, data, build_tokenizer)
    train, val, test = open_splits(config, data, tokenizer)
    splits = {"train": train, "val": val, "test": test}
    distributed.same_everywhere([s and s.folder.name for s in splits.values()], "the data")
    describe_data(splits, config.max_length)
    plan = BatchPlan(train, sizes, seed=config.seed, group_by_length=config.group_by_length,
                     row_weight=row_weight(config, train))  # fmt: skip
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
    evals = config.evals_per_epoch
    eval_steps = {-(-plan.steps_per_epoch * i // evals) for i in range(1, evals + 1)}

    # -- model -----------------------------------------------------------------------------------
    seed_everything(config.seed)  # the same first weights on every rank
    model = build_model(config, tokenizer, train.labels).to(device)
    if config.precision == "fp64":
        model.double()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        model.compile(dynamic=True)
    describe_model(model)
    optimizer = build_optimizer(model, config)
    schedule = Schedule(optimizer, config.schedule, total_steps, config.warmup_ratio)
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
    autocast = partial(torch.autocast, device.type, half, enabled=half is not None)
    measure = partial(evaluate, model, device=device, autocast=autocast,
                      batch_size=config.eval_batch_size)  # fmt: skip

    # -- resume ----------------------------------------------------------------------------------
    seed_everything(config.seed + 1 + rank)  # another dropout on every rank
    step = epoch = step_in_epoch = 0
    best: dict = {"score": -math.inf, "step": 0, "waited": 0}
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)  # of this rank, since last log
    weight_sum = 0.0  # of all ranks, since last log
    evaluation_due = False
    learned = config.what_is_learned() | {
        "global_batch_size": sizes.global_batch_size, "total_steps": total_steps,
        "data": [train.folder.name, val and val.folder.name],
    }  # fmt: skip
    if source is not None:
        state = checkpoint.load_state(on_main((source / "state.pt").read_bytes))
        checkpoint.check_same_run(state["learned"], learned)
        on_main(lambda: load_weights(model, source))
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        if scaler.is_enabled() and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        step, epoch, step_in_epoch = state["step"], state["epoch"], state["step_in_epoch"]
        best, weight_sum = state["best"], state["weight_sum"]
        evaluation_due = state["evaluation_due"]
        of_ranks = state["ranks"]
        if len(of_ranks) == world_size:
            loss_sum += of_ranks[rank]["loss_sum"]
            set_rng_state(of_ranks[rank]["rng"], device)
        else:
            loss_sum += sum(r["loss_sum"] for r in of_ranks) if rank == 0 else 0.0
            log.warning("the run had %d ranks and now has %d: the same rows in the same steps, "
                        "other dropout", len(of_ranks), world_size)  # fmt: skip
        log.info("resuming after step %d from %s", step, source)

    # -- ready -----------------------------------------------------------------------------------
    if not on_main(lambda: runs.claim(run, source, best["step"])):
        best.update(score=-math.inf, step=0)  # those weights are not here: find others
    tracker = Tracker(run, config, is_main(), step)
    on_main(lambda: keep_bad_rows(run, splits))
    ddp = distributed.wrap(model, device)  # gives every rank the main process's weights
    parameters = [p for p in model.parameters() if p.requires_grad]
    meter = Meter()

    def validate() -> None:
        """Evaluate, tell the schedule, and keep the weights if they are the best so far."""
        assert val is not None
        result = measure(store=val)
        note = "  before training"  # which also proves that evaluation works
        if step > 0:
            score = result.metrics[config.metric] * (-1 if config.metric == "loss" else 1)
            schedule.evaluated(score)
            best["waited"] += 1
            note = f"  best {config.metric} was at step {best['step']}"
            if score > best["score"]:  # never true of NaN
                best.update(score=score, step=step, waited=0)
                note = f"  best {config.metric} so far"
                on_main(lambda: checkpoint.export(run / "best", model, tokenizer, step))
            distributed.check_replicas(model)
        tracker.evaluated(step, step / plan.steps_per_epoch, "val", result, note)

    if val is not None and (source is None or evaluation_due):
        validate()

    # -- training --------------------------------------------------------------------------------
    log.info("training to step %d, %d in an epoch; %s", total_steps, plan.steps_per_epoch, run)
    tracker.start_bar(total_steps, step)
    patience = config.early_stopping_patience
    stopped, early = False, 0 < patience <= best["waited"]
    model.train()
    meter.reset()
    while step < total_steps and not stopped and not early:
        plan.set_epoch(epoch, step_in_epoch)
        for batch in meter.timed(loader):
            micro = batch.plan
            inputs = {k: v.to(device, non_blocking=True) for k, v in batch.inputs.items()}
            labels = batch.labels.to(device, non_blocking=True)
            weight = batch.weight.to(device, non_blocking=True)  # (batch,)
            with nullcontext() if micro.ends_step else ddp.no_sync():
                with autocast():
                    logits = ddp(**inputs).logits  # (batch, labels)
                losses = loss_per_row(logits, labels, config.label_smoothing)
                loss = weighted_sum(losses, weight)
                # DDP averages over ranks; this makes it the mean over the whole global batch.
                scaler.scale(loss * (world_size / micro.weight_sum)).backward()
            loss_sum += loss.detach()
            if not micro.ends_step:
                continue
            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm_(parameters, config.max_grad_norm or math.inf)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:  # lower: fp16 overflowed and the step was skipped
                schedule.step()
            optimizer.zero_grad()

            step, step_in_epoch = step + 1, step_in_epoch + 1
            weight_sum += micro.weight_sum
            meter.add(micro)
            tracker.advance()
            if step % config.log_every == 0 or step == total_steps:
                tracker.train_step(step, step / plan.steps_per_epoch, {
                    "loss": reduce_tensor(loss_sum).item() / weight_sum,
                    **learning_rates(optimizer),
                    "grad_norm": grad_norm.item(),
                    "loss_scale": scaler.get_scale(),
                    **meter.rates(),
                })  # fmt: skip
                loss_sum.zero_()
                weight_sum = 0.0
                meter.reset()

            # -- evaluate, save, stop: every rank decides the same ---------------------------------
            stopped = stop.agreed()
            at_evaluation = step == total_steps or step_in_epoch in eval_steps
            at_save = bool(config.save_every) and step % config.save_every == 0
            if step_in_epoch == plan.steps_per_epoch:
                epoch, step_in_epoch = epoch + 1, 0
            if not (stopped or at_evaluation or at_save):
                continue
            with meter.pause():
                evaluation_due = at_evaluation and val is not None
                if evaluation_due and not stopped:  # else it is the first thing after resuming
                    validate()
                    evaluation_due = False
                early = 0 < patience <= best["waited"]
                mine = {"rng": rng_state(device), "loss_sum": loss_sum.item()}
                state = {
                    "step": step, "epoch": epoch, "step_in_epoch": step_in_epoch, "best": best,
                    "evaluation_due": evaluation_due, "weight_sum": weight_sum,
                    "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                    "scaler": scaler.state_dict(), "ranks": gather(mine), "learned": learned,
                }  # fmt: skip
                on_main(partial(checkpoint.save, run / "checkpoints", step, model, tokenizer, state,
                                config.keep_checkpoints))  # fmt: skip
            if stopped or early or step >= total_steps:
                break

    # -- the end ---------------------------------------------------------------------------------
    stop.close()
    if not stopped and val is None:
        on_main(lambda: checkpoint.export(run / "best", model, tokenizer, step))
    if on_main((run / "best").exists) and not stopped:
        on_main(lambda: load_weights(model, run / "best"))
        distributed.broadcast_weights(model)
    facts = {
        "stopped": stopped, "step": step, "epoch": step / plan.steps_per_epoch,
        "best_step": best["step"] or step, "early": early, "metric": config.metric,
        "labels": train.labels, "timings": {"seconds": time.perf_counter() - began},
    }  # fmt: skip
    final = {} if stopped else {k: s for k, s in splits.items() if s is not None and k != "train"}
    finish(run, config, tracker, measure, final, facts)
    tracker.close()
    runs.release()


if __name__ == "__main__":
    distributed.run(main, CONFIG)
