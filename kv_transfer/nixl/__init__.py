"""The NIXL connector. The only importer of NIXL."""
