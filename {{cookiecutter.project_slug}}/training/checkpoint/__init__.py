"""What a run needs to resume: verified folders, written in the background, and a run's own folder.
And what it begins with: `pretrained.py`, `pretrained_tokenizer.py`, which model.py calls.

Imports `settings/` and `distributed/`. Nothing here knows what a step or a row is: a part of the
state is anything with `state_dict` and `load_state_dict`. Read first: `state.py` (what is in a
checkpoint besides the weights), then `checkpoint.py` (a folder is written whole or not at all).
"""
