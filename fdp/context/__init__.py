"""The context of the running code: a group of ranks, a loop over microbatches, settings of the thread."""
