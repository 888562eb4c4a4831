"""The architectures that Baton loads, one file each. A checkpoint is checked before torch is loaded, so that only files
with a model of their own import it.
"""
