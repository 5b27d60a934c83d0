"""Pipelines planned: schedules, timetables and their simulator (free of JAX), the stages of parameters, and their buffers."""
