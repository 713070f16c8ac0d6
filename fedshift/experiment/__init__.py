"""Settings, TOML, presets and grids: text is converted to objects. Nothing here trains or writes a run."""
