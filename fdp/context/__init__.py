"""What the code that is running now belongs to: a group of ranks, a loop over microbatches, settings of the thread."""
