"""Mixtures of experts: layers in which every token goes through a few of many MLPs."""
