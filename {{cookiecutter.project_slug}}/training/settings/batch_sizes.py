"""How many rows a micro-batch has, and how many micro-batches a step."""

import math
from dataclasses import dataclass

from training.settings.config import AUTO, TrainConfig
from training.settings.errors import UserError


@dataclass(frozen=True)
class BatchSizes:
    """On every rank, `gradient_accumulation_steps` micro-batches of at most `batch_size` rows."""

    global_batch_size: int
    batch_size: int
    gradient_accumulation_steps: int


def batch_sizes(config: TrainConfig, world_size: int, num_replicas: int = 1) -> BatchSizes:
    """Derive the batch sizes that are left open; refuse three numbers that do not agree. The
    `num_replicas` of the model in each rank share a micro-batch (`--strategy dp`)."""
    total, accumulation = config.global_batch_size or 32, config.gradient_accumulation_steps
    is_auto = config.batch_size == AUTO  # begin with all rows; auto_batch_size.py sees what fits
    micro = total if is_auto else config.batch_size * num_replicas
    if accumulation is None:
        accumulation = math.ceil(total / (micro * world_size))
        return BatchSizes(total, math.ceil(total / (accumulation * world_size)), accumulation)
    product = micro * accumulation * world_size
    if config.global_batch_size in (None, product):
        return BatchSizes(product, micro, accumulation)
    raise UserError(
        f"global_batch_size {config.global_batch_size} is not batch_size {micro} x "
        f"gradient_accumulation_steps {accumulation} x world size {world_size} = {product}; "
        "leave one of them out"
    )
