"""Processes: how ranks are started, asked to stop, restarted, and how their failures are reported.

Read `launcher.py` first: `launch.sh` calls it, it checks the flags, and `agent.py` runs the ranks.
Rendezvous and failure_report are also the launcher's. In each rank's process: worker (the life of
a rank) and signals, with the table of signals and exit codes.

Imports only settings/ and distributed/; worker.py may see everything but the user's files.
"""
