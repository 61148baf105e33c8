"""Commands that run several others: prepare, train, evaluate. One file for each kind of wish."""
