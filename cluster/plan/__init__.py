"""What would be placed where and what fits, before anything starts. Imports no Ray at the top."""
