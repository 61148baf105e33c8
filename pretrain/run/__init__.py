"""The run folder: its layout, the lease of its owner, signals, heartbeats and the watchdog."""
