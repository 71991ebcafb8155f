"""A Lightning module trained with the strategy "ddp", as Lightning's guides tell.

How rows are padded is left to the user there: this takes transformers' collator, which pads to the
longest row of a batch. Lightning puts in its distributed sampler. Loggers and the progress bar are
off; the checkpoint at the end of an epoch and the sanity check before training are its defaults.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import grad_norm
from probe import Probe, build_model, build_rows, build_tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, get_linear_schedule_with_warmup

probe = Probe()
asked = probe.asked


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(asked).train()  # Lightning leaves it as it comes: without dropout
        probe.watch(self.model)

    def setup(self, stage: str) -> None:
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        if asked.max_steps:
            self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        outputs = self.model(**batch)
        right = (outputs.logits.argmax(dim=-1) == batch["labels"]).float().mean()
        for name, value in (("val_loss", outputs.loss), ("val_accuracy", right)):
            self.log(name, value, sync_dist=True, batch_size=len(batch["labels"]))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            probe.evaluated()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if asked.max_steps:
            losses: Any = self.all_gather(torch.stack(self.losses))
            probe.note(losses.mean(), grad_norm(self, 2)["grad_2.0_norm_total"])
            self.losses.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=asked.lr, weight_decay=asked.weight_decay
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(
            optimizer, int(asked.warmup_ratio * steps), steps
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    tokenizer = build_tokenizer(asked)
    rows = build_rows(asked, tokenizer)
    collate = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(
        rows["train"], shuffle=True, collate_fn=collate, batch_size=asked.batch_size
    )
    val_loader = DataLoader(rows["val"], collate_fn=collate, batch_size=asked.eval_batch_size)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=asked.ranks,
        strategy="ddp" if asked.ranks > 1 else "auto",
        max_epochs=1,
        max_steps=asked.max_steps or -1,
        accumulate_grad_batches=asked.accumulation,
        gradient_clip_val=asked.clip,
        default_root_dir=asked.out,
        logger=False,
        enable_progress_bar=False,
        limit_val_batches=0 if asked.max_steps else None,
        enable_checkpointing=not asked.max_steps,
    )
    trainer.fit(Classifier(), loader, val_loader)


if __name__ == "__main__":
    main()
