"""WHERE: axes, mesh shapes, worlds, groups, backends, simulated devices."""
