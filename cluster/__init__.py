"""The composition root: Ray Serve graph, configuration, command line. The only importer of Ray."""
