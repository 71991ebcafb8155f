"""What a run needs to resume: verified folders, written in the background, and a run's own folder.

Imports `settings/` and `distributed/`. Nothing here knows what a step or a row is: a part of the
state is anything with `state_dict` and `load_state_dict`.

Read first: `state.py` (what is in a checkpoint besides the weights), then `checkpoint.py` (how a
folder is written whole or not at all). `saver.py` writes in the background, `run_folder.py` chooses
what to resume from, `rng.py` keeps the random state of every rank.
"""
