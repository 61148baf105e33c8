"""For all tests."""

import os
import signal

import hypothesis

# One thread a process, set before torch is imported: several test processes and their ranks share few cores, and
# threads that wait for each other there make small models a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's store looks up the name of whoever connects, and all others wait: five seconds a lost answer is too long.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell starts background jobs with SIGINT ignored, and what is ignored is inherited: Ctrl-C tests would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and no time limit on one: the machine may be busy.
hypothesis.settings.register_profile("pretrain", derandomize=True, deadline=None)
hypothesis.settings.load_profile("pretrain")
