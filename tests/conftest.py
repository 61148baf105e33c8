"""For all tests."""

import signal

import hypothesis

# A shell starts background jobs with SIGINT ignored, and what is ignored is inherited: Ctrl-C tests would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and no time limit on one: the machine may be busy.
hypothesis.settings.register_profile("pretrain", derandomize=True, deadline=None)
hypothesis.settings.load_profile("pretrain")
