"""The processes of a job: started, watched, in touch across machines, and ended."""
