"""What would this load need? Loads, layouts and calibrations by their names, and what layouts make of a load."""
