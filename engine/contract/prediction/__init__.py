"""Predicted outputs: what callers predict of their answers, for workers and routers."""
