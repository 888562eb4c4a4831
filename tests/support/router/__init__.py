"""Routers with fake or real workers behind them."""
