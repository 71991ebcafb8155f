"""A loop with Hugging Face's Accelerate, in the manner of its example `nlp_example.py`.

As there: a collate function that pads to the longest row of a batch, shuffled loaders, PyTorch's
AdamW with its defaults, a linear schedule, metrics from `gather_for_metrics`. Clipping and
accumulation are added as Accelerate's guides tell.
"""

from typing import Any

import torch
from accelerate import Accelerator
from probe import Probe, build_model, build_rows, build_tokenizer
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

probe = Probe()
asked = probe.asked


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=asked.accumulation)
    tokenizer = build_tokenizer(asked)
    with accelerator.main_process_first():
        rows = build_rows(asked, tokenizer)

    def collate(examples: list[dict[str, Any]]) -> Any:
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    loader = DataLoader(
        rows["train"], shuffle=True, collate_fn=collate, batch_size=asked.batch_size, drop_last=True
    )
    val_loader = DataLoader(
        rows["val"], shuffle=False, collate_fn=collate, batch_size=asked.eval_batch_size
    )
    model = build_model(asked).to(accelerator.device)
    probe.watch(model)
    optimizer = AdamW(model.parameters(), lr=asked.lr, weight_decay=asked.weight_decay)
    steps = asked.max_steps or len(loader) // (asked.accumulation * asked.ranks)
    # The prepared schedule steps once for each rank.
    schedule = get_linear_schedule_with_warmup(
        optimizer, int(asked.warmup_ratio * steps) * asked.ranks, steps * asked.ranks
    )
    model, optimizer, loader, val_loader, schedule = accelerator.prepare(
        model, optimizer, loader, val_loader, schedule
    )

    model.train()
    losses: list[torch.Tensor] = []
    for batch in loader:
        batch.to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), asked.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if asked.max_steps:
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                mean = accelerator.gather(torch.stack(losses)).mean()
                probe.note(mean.item(), grad_norm.item())
                losses.clear()
            if len(probe.numbers) == asked.max_steps:
                accelerator.end_training()
                return

    model.eval()
    right = total = 0
    for batch in val_loader:
        batch.to(accelerator.device)
        with torch.no_grad():
            predicted = model(**batch).logits.argmax(dim=-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        right, total = right + int((predicted == labels).sum()), total + len(labels)
    accelerator.print(f"accuracy {right / total:.4f} of {total} rows")
    probe.evaluated()
    accelerator.end_training()


if __name__ == "__main__":
    main()
