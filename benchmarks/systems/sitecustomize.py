"""Ours: puts the probe into the ranks of an unchanged `launch.sh` and `train.py`.

Python imports a module of this name, which is found on PYTHONPATH, before it runs its script.
"""

import os

if "PEERS" in os.environ and "RANK" in os.environ:
    import gc
    from typing import Any

    gc.disable()  # as train.py does before it imports the same
    from probe import Probe
    from training.distributed import wrap as module
    from training.step.evaluation import Evaluator

    probe = Probe()
    wrapped, evaluated = module.wrap, Evaluator.evaluate

    def wrap(model: Any, *others: Any) -> Any:
        probe.watch(model)
        return wrapped(model, *others)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluated(*args, **kwargs)
        probe.evaluated()
        return result

    vars(module)["wrap"] = wrap  # before train.py imports it
    Evaluator.evaluate = evaluate
