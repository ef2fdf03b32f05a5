"""Which samples each rank takes, and in which order: a function of a seed and of the step alone."""
