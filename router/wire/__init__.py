"""The links to the workers: they carry requests to workers, and tokens back."""
