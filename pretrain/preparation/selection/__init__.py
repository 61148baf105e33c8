"""Rules that leave out documents by comparison with others or by their quality."""
