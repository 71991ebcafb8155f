"""The settings of a run: each field of `TrainConfig` is a flag and a key of `config.toml`.

Read `config.py` first: all that is true of a setting stands at its field; `setting.py` says what
can be declared there. It imports only the standard library, and nothing of this project outside
this folder, so that `--help` and a mistyped flag are answered before PyTorch is imported.
"""
