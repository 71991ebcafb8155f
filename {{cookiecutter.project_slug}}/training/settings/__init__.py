"""The settings of a run: `TrainConfig`, one frozen dataclass of plain types, each field a flag of
`train.py` and a key of `config.toml`.

Read `config.py` first: all that is true of a setting stands at its field, and a new field needs no
other line. `setting.py` says what can be declared there; `flags.py` reads the settings file and the
flags; `batch_sizes.py` derives micro-batches and accumulation; `errors.py` has UserError.

Only the standard library is imported, and nothing of this project outside this folder, so that
`--help` and a mistyped flag are answered before PyTorch is imported.
"""
