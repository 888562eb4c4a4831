"""The commands of `baton`, one file each, and what they share."""
