"""What is known of one operator of a graph: its memory effects, the strides of its results, and its source line."""
