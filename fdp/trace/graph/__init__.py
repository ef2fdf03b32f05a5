"""Analyses and rewrites of the whole graph: dependencies, what varies, loops."""
