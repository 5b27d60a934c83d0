"""What a plan sends and holds, from shapes: the one model of cost that ledger, planner and facades add up."""
