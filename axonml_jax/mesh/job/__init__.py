"""Joining and leaving a job: the launcher's environment, the coordinator, the roll call."""
