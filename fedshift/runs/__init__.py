"""Run directories: write, checkpoint, resume and read them; single runs, packs and sweeps."""
