"""What callers predict of their answers, as workers and routers see it."""
