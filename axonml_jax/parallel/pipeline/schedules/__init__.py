"""Pipeline schedules and the timetables that they become: no JAX here."""
