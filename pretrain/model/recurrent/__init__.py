"""The recurrent core: torch's own RNN, LSTM and GRU. Start with `recurrent.py`."""
