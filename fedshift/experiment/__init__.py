"""Settings, TOML, presets and grids: text becomes objects. Nothing here trains or writes a run."""
