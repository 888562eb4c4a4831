"""What would this load need? Loads, layouts and calibrations by name, and how layouts serve a load."""
