"""Products with weights in panels: the kernel, and the tiles that it computes."""
