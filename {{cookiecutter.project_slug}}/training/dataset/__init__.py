"""From files to batches: files to rows, rows to token ids, token ids to a memory-mapped store.

    files.py       find, open and decode data files
    arrow.py       Parquet, Arrow and Hugging Face data sets to raw values
    rows.py        what a row is, and what makes one bad
    readers.py     files to rows, strictly: every error names file and line
    tokenizer.py   texts to token ids; wordpiece.py: a vocabulary trained on the rows
    build.py       rows to a token store, once, by one process
    token_store.py the store: micro-batches straight from the mapped files; the validation split

Imports only settings and distributed: it knows no model, step or run. Read rows.py first, then
readers.py and token_store.py.
"""
