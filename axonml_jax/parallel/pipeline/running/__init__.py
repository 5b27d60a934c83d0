"""Running a timetable: ticks, the buffers between stages, and the weights of each tick."""
