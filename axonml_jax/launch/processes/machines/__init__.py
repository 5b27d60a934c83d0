"""The launchers of a job's machines: how they gather, what they tell each other, and which of them make up the next world."""
