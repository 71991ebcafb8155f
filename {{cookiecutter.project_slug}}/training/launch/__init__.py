"""Processes: how ranks are started, asked to stop, restarted, and how their failures are reported.

Read `launcher.py` first: `launch.sh` calls it, it checks the flags, and `agent.py` runs the ranks.
`signals.py` has the table of signals and exit codes. In the launcher's process: launcher,
rendezvous, agent, failure_report. In each rank's: worker (the life of a rank), signals.

Imports only settings/ and distributed/; worker.py may see everything. Nothing here imports
train.py, model.py, data.py or metrics.py.
"""
