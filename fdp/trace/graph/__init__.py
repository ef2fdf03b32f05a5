"""What follows from the whole graph, and how it is written anew: what must wait for what, what varies, loops."""
