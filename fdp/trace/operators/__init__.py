"""What is known of one operator of a graph: what it does to memory, how its results lie, which line called it."""
