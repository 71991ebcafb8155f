"""Hugging Face's Trainer, as the text classification guide of transformers uses it.

`sampling` is "random" or "group_by_length". Reports and the progress bar are off.
"""

from pathlib import Path
from typing import Any

from probe import Probe, build_model, build_rows, build_tokenizer
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

probe = Probe()
asked = probe.asked


class Notes(TrainerCallback):
    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        probe.evaluated()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kw: Any) -> None:
        if asked.max_steps and "grad_norm" in (logs or {}):
            probe.note(logs["loss"], logs["grad_norm"])


def accuracy(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main() -> None:
    logging = {"max_steps": asked.max_steps, "logging_steps": 1} if asked.max_steps else {}
    saving = "no" if asked.max_steps else "epoch"
    arguments = TrainingArguments(
        output_dir=str(Path(asked.out) / "trainer"),
        learning_rate=asked.lr,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.clip,
        warmup_steps=asked.warmup_ratio,
        per_device_train_batch_size=asked.batch_size,
        per_device_eval_batch_size=asked.eval_batch_size,
        gradient_accumulation_steps=asked.accumulation,
        num_train_epochs=1,
        train_sampling_strategy=asked.sampling,
        eval_strategy=saving,
        save_strategy=saving,
        load_best_model_at_end=not asked.max_steps,
        seed=asked.seed,
        use_cpu=True,
        ddp_backend="gloo" if asked.ranks > 1 else None,
        report_to="none",
        disable_tqdm=True,
        **logging,
    )
    tokenizer = build_tokenizer(asked)
    with arguments.main_process_first():
        rows = build_rows(asked, tokenizer)
    model = build_model(asked)
    probe.watch(model)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["val"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        compute_metrics=accuracy,
        callbacks=[Notes()],
    ).train()


if __name__ == "__main__":
    main()
