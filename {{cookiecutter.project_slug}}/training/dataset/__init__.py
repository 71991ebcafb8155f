"""From files to batches: files to rows, rows to token ids, token ids to a memory-mapped store.

Imports only settings and distributed: it knows no model, step or run. Read rows.py first, then
readers.py (files to rows), build.py (rows to a store) and token_store.py (a store to batches).
"""
