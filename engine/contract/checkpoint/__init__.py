"""What both engines and routers read from a checkpoint's directory."""
