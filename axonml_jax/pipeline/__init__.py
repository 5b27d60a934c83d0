"""Pipelines: schedules, timetables and their simulator (all free of JAX), and the executor that runs any timetable."""
