"""Who computes a prompt and who generates behind it, by what every worker is predicted to need. Pure functions."""
