"""The best plan for a number of devices, found on paper: every legal plan priced by the ledger, on a table of hardware."""
