"""Commands on what runs have left in their folders: `eval`, `generate`, `runs`."""
