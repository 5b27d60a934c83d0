"""The state of a run in host memory that outlives its processes: copies every few steps, on the own machine and on another."""
