"""Models of any plan as lm-evaluation-harness wants them: likelihoods of text, and text until a stop word."""
