"""The architectures that Baton loads, one file each. Free of torch: a checkpoint is checked before torch is loaded."""
