"""What papers and other libraries say a plan costs, as exact formulas: the yardsticks beside which predictions stand."""
