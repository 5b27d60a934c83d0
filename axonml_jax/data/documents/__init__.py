"""Documents: text to tokens, and tokens to rows that hold several documents."""
