"""Changes of the logits that requests ask for, one file each."""
