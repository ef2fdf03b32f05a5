"""What a traced step must not do, and what a trace cannot be sure of."""
