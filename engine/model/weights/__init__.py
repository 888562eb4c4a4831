"""A checkpoint's weights: finding, checking and loading them."""
