"""Steps that are not finite: loss scaling, skipped updates and their counts."""
