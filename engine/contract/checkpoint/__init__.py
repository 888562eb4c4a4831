"""What engines and routers read alike in a checkpoint's directory."""
