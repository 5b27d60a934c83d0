"""Running a pipeline: a loss cut into stages, what each keeps for its backward, a scan over the ticks of any timetable."""
