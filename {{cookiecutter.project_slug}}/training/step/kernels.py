"""Which kernels compute: the usual ones, faster ones, or those that repeat to the bit."""

import os

import torch

from training.settings.config import TrainConfig


def choose_kernels(config: TrainConfig) -> None:
    """Before anything is computed: by `--deterministic`, and `--precision tf32`.

    With `deterministic`, PyTorch refuses an operation that has no such kernel on this device.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at cuBLAS's first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.precision == "tf32":  # matrix products alone; sums and weights stay fp32
        torch.backends.cuda.matmul.fp32_precision = "tf32"
