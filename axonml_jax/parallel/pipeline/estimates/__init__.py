"""What a pipeline costs on paper: time, bubble and memory, and which schedule is fastest."""
