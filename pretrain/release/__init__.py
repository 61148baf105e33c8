"""Released runs: everything that another person needs to continue one, and to check it.

release         a run folder -> OUT: records, checkpoints, data recipe, hashes   (write_released.py)
continue        OUT, a step  -> a new run folder; its rows and the released ones (continuation.py)
verify-release  OUT          -> hashes; random steps trained again               (verification.py)
"""
