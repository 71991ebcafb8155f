"""One optimizer step: a global batch, its loss, the update, and the evaluation of what came of it.

Imports `settings/`, `distributed/` and `dataset/`. Nothing here writes files or logs metrics.
Read first: `batch_plan.py` (which rows make up a step, and which rank computes which of them),
then `loss.py` and `optimizer.py`. `auto_batch_size.py` serves a flag.
"""
