"""The config: pydantic sections, presets, and loading from YAML. Imports no torch."""
