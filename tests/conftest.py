"""For all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, and what is ignored is inherited: Ctrl-C tests would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
