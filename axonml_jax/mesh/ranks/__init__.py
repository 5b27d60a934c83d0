"""How the ranks of one group run a program together: threads of one process, or real processes."""
