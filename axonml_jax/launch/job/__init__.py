"""A training job: devices, data, the loop, records, checkpoints and stopping."""
