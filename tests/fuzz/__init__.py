"""Random steps under fdp against plain PyTorch: what a program is, how one is drawn, run, compared and shrunk."""
