"""Ranks: the processes that train one model together, and the model over all of them.

Imports only `settings/`. Nothing here knows of rows, steps or checkpoints.
Read first: `ranks.py` (process group, `reduce_tensor`, `on_main`), then `wrap.py` (DDP, FSDP).
`watchdog.py` names the rank that hangs, `replicas.py` finds ranks whose weights differ,
`full_state.py` goes between sharded and full tensors.
"""
