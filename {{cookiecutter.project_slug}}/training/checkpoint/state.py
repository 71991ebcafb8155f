"""The state of a run besides its weights: what makes a resumed run bit-identical."""

import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from training.checkpoint import checkpoint
from training.checkpoint.model_folder import ModelFolder
from training.checkpoint.rng import RankRng
from training.distributed.full_state import NamedOptimizerState
from training.distributed.ranks import on_main
from training.settings.errors import UserError

log = logging.getLogger("training")


@dataclass
class Progress:
    """How far a run is; the same on every rank."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    step_in_epoch: int = 0
    best_score: float = -math.inf
    best_step: int = 0
    evaluations_since_best: int = 0
    evaluation_due: bool = False  # the run was stopped before the evaluation of this step was over

    def end_step(self, steps_per_epoch: int) -> None:
        self.step, self.step_in_epoch = self.step + 1, self.step_in_epoch + 1
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def evaluated(self, score: float) -> bool:
        """Record a score; higher is better. Returns whether it is the best so far: NaN never is."""
        self.evaluation_due = False
        if score > self.best_score:
            self.best_score, self.best_step, self.evaluations_since_best = score, self.step, 0
            return True
        self.evaluations_since_best += 1
        return False

    def forget_best(self) -> None:
        """Call where the best weights are gone: the next evaluation finds new ones."""
        self.best_score, self.best_step = -math.inf, 0

    def should_stop_early(self, patience: int) -> bool:
        """Whether `patience` evaluations brought no better score; with patience 0 never."""
        return 0 < patience <= self.evaluations_since_best

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class TrainState:
    """All of a run's state but the weights. To keep something new, add it to the `parts`.

    `settings`: what a resumed run must have in common with the run that it continues.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self.folder, self.model, self.progress = folder, folder.model, Progress()
        self.settings = folder.config.resume_settings()
        rng = RankRng(next(self.model.parameters()).device)
        self.parts: dict[str, Any] = {"progress": self.progress, "rng": rng}
        self.checked: set[str] = set()

    def _parts(self) -> Iterator[tuple[str, Stateful]]:
        for name, part in self.parts.items():
            is_optimizer = isinstance(part, Optimizer)
            yield name, NamedOptimizerState(self.model, part) if is_optimizer else part

    def check(self) -> None:
        """Call on every rank when all parts are there. Errors: UserError for one that a checkpoint
        cannot hold; it would otherwise show when the run is resumed."""
        for name, part in self.parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                rule = "a part of the state must have state_dict and load_state_dict"
                raise UserError(f"state.parts[{name!r}]: {rule}; a {type(part).__name__} does not")
        for name, part in self._parts():
            content = part.state_dict()
            if isinstance(part, NamedOptimizerState):  # its state may be sharded
                content = content["param_groups"]
            on_main(partial(checkpoint.check_content, f"state.parts[{name!r}]", content))
        self.checked = set(self.parts)

    def state_dict(self) -> dict[str, Any]:
        """Call on every rank; tensors may be sharded."""
        if late := sorted(self.parts.keys() - self.checked):
            raise UserError(f"state.parts: add {', '.join(late)} before state.restore in train.py")
        parts = {name: part.state_dict() for name, part in self._parts()}
        return {"settings": self.settings, **parts}

    def restore(self, source: Path) -> None:
        """Bring weights and parts to where the checkpoint `source` was. Call on every rank.

        Errors: UserError if the run would learn something else, unless --resume-anyway is given.
        """
        self.check()
        saved: dict[str, Any] = {}  # empty but on the main process
        resume_anyway = self.folder.config.resume_anyway
        on_main(lambda: saved.update(checkpoint.load_state(source)))
        settings, names = on_main(lambda: (saved["settings"], list(saved)))
        check_same_run(settings, self.settings, resume_anyway)
        missing = [name for name in self.parts if name not in names]
        if missing and not resume_anyway:
            raise UserError(
                f"{source} was written without {', '.join(missing)}; resume with the code that "
                "wrote it, or let these parts start from their initial state with --resume-anyway"
            )
        self.folder.load(source)  # before the random state
        for name, part in self._parts():
            if isinstance(part, NamedOptimizerState) and name in names:
                part.load_state_dict(saved.get(name, {}))  # large: it is sent tensor by tensor
            elif state := on_main(partial(saved.get, name)):  # empty for a scaler not in use
                part.load_state_dict(state)
        batch, now = settings["global_batch_size"], self.settings["global_batch_size"]
        if batch != now:  # continue the epoch at about the row where it was
            self.progress.step_in_epoch = self.progress.step_in_epoch * batch // now
        log.info(f"resuming after step {self.progress.step} from {source}")


def check_same_run(saved: dict[str, Any], now: dict[str, Any], resume_anyway: bool) -> None:
    """Errors: UserError if settings differ that change what is learned, unless `resume_anyway`."""
    if saved["total_steps"] != now["total_steps"]:
        log.warning(
            f"the schedule was made for {saved['total_steps']} steps and now is for "
            f"{now['total_steps']}: the learning rate continues as the new schedule has it"
        )
    names = [name for name in now if name != "total_steps"]
    changes = [change for n in names if (change := change_of(n, saved.get(n), now[n]))]
    if not changes:
        return
    if not resume_anyway:
        raise UserError(
            f"this run cannot be resumed with other settings: {'; '.join(changes):.500}; give "
            "another --run-name to start a new one, or insist with --resume-anyway"
        )
    log.warning(f"resumed anyway, the run is not the same any more: {'; '.join(changes)}")


def change_of(name: str, saved: Any, now: Any) -> str:
    """How a setting differs, or "". Of files the content counts, wherever they are."""
    old, new = (value if isinstance(value, dict) else {"name": value} for value in (saved, now))
    contents = old.get("content"), new.get("content")
    if old["name"] != new["name"] and (contents[0] != contents[1] or contents[0] is None):
        return f"{name} was {old['name']!r}, now {new['name']!r}"
    if contents[0] != contents[1] and None not in contents:  # None: it is gone since
        return f"{name} is {new['name']!r} as before, with another content"
    return ""
