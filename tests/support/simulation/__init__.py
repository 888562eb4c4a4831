"""What tests of virtual clusters share."""
