"""Run folders that an object store keeps for all machines: leases, copies, and their upkeep."""
