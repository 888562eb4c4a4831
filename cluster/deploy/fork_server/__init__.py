"""Workers of a private Ray as forks of one process, so that the modules that they share are loaded once."""
