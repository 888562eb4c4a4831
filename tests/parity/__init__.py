"""Every feature along every path and through every fault: the answers of one engine that nothing disturbs."""
