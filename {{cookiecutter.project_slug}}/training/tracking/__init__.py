"""What a run reports: the screen, `metrics.jsonl`, TensorBoard, throughput, and the final report.

Imports every other folder but `launch/`; only `train.py` and the companions import it.
Read first: `monitor.py` (the bookkeeping of a step), then `tracker.py` (where its numbers go).
`results.py` writes what a run leaves behind; `data_report.py` is `python data.py --report`.
"""
