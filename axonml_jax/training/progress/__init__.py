"""What a training shows while it runs, on one line that is written again and again."""
