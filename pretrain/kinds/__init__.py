"""Everything that a config chooses by name: one record in one file, which the stages ask. Imports no torch."""
