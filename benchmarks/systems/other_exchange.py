"""train.py with another rule for when ranks reduce gradients: EXCHANGE=always, or never.

Always, after every micro-batch, is what a loop without `no_sync` does. Never shows what a step
costs without the network; the ranks then train different models.
"""

import os
import sys

from training.settings.flags import parse_args

CONFIG = parse_args(sys.argv[1:])

import train  # noqa: E402
from training.launch import worker  # noqa: E402

exchange = os.environ["EXCHANGE"] == "always"
gradient_sync = train.gradient_sync
train.gradient_sync = lambda wrapped, model, ends_step: gradient_sync(wrapped, model, exchange)
train.check_replicas = lambda model: None
worker.run(train.main, CONFIG)
